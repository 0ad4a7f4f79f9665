"""The pages of the site: links lead somewhere, the navigation has every page, the API page every public name."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import ds_vrgd
import ds_vrgd.schedules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site_pages() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "scripts" / "site_pages.py"))


def test_every_page_is_gathered(site_pages: dict[str, Any], tmp_path: Path) -> None:
    site_pages["main"](tmp_path / "pages")  # a broken link or a page without a place is an error
    gathered = {page.name for page in (tmp_path / "pages").glob("*.md")}
    in_docs = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    elsewhere = {"index.md", "PAGES.md", "IMAGES.md", "RECIPES.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert gathered == in_docs | elsewhere
    assert "](START.md)" in (tmp_path / "pages" / "index.md").read_text()  # docs/START.md, from the README
    assert (tmp_path / "pages" / "figures" / "how_it_works.svg").is_file()


def test_a_link_to_nothing_is_an_error(site_pages: dict[str, Any]) -> None:
    rewritten, site = site_pages["rewritten"], site_pages["pages"]()
    page = ROOT / "docs" / "START.md"
    assert rewritten(page, "[a](../README.md#use) `x`", site, set()) == "[a](index.md#use) `x`"
    assert rewritten(page, "```\n[a](gone.md)\n```\n", site, set()) == "```\n[a](gone.md)\n```\n"
    with pytest.raises(SystemExit, match=r"docs/START.md: the link gone.md leads to no file"):
        rewritten(page, "[a](gone.md)", site, set())


def anchors(text: str) -> set[str]:
    """Return the anchors that the repository's web view gives the headings of a page."""
    found: dict[str, int] = {}
    for heading in re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    ):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{n}" if n else slug for slug, last in found.items() for n in range(last + 1)}


def test_every_link_to_a_heading_finds_it(site_pages: dict[str, Any]) -> None:
    texts = {page.resolve(): page.read_text(encoding="utf-8") for page in site_pages["pages"]()}
    found, broken = 0, []
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]*#[^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            if linked in texts:
                found += 1
                broken += [] if anchor in anchors(texts[linked]) else [f"{page.name}: {target}"]
    assert broken == []
    assert found > 30


def test_the_built_site_is_checked(tmp_path: Path) -> None:
    check = runpy.run_path(str(ROOT / "scripts" / "check_site.py"))
    (tmp_path / "one.html").write_text('<a href="two.html#here">x</a><p id="top">text</p><a href="#top">y</a>')
    (tmp_path / "two.html").write_text('<h1 id="here">x</h1><code>:class:`X`</code>')
    assert check["main"](tmp_path) == 0
    (tmp_path / "two.html").write_text('<a href="gone.html">x</a><img src="gone.svg">:class:<code>X</code> ([a](b.md))')
    assert check["faults"](tmp_path) == [
        "one.html: two.html#here leads to no anchor",
        "two.html: :class: is not rendered",
        "two.html: ](b.md) is not rendered",
        "two.html: gone.html leads to no file",
        "two.html: gone.svg leads to no file",
    ]


def test_the_site_shows_no_markup_of_sphinx() -> None:
    griffe = mock.MagicMock(Extension=object)  # which only `make docs` installs
    with mock.patch.dict(sys.modules, {"griffe": griffe}):
        extension = runpy.run_path(str(ROOT / "scripts" / "composed_docstrings.py"))
    shown = extension["as_markdown"](
        "See :class:`~ds_vrgd.VRLAMB`, :meth:`step` and `:x:`. So::\n\n    x[::2]\n\nSaid. ::\n"
    )
    assert shown == "See `VRLAMB`, `step` and `:x:`. So:\n\n    x[::2]\n\nSaid.\n"


def test_the_api_page_has_every_public_name() -> None:
    named = set(re.findall(r"^::: (\S+)$", (ROOT / "docs" / "API.md").read_text(), re.MULTILINE))
    public = {f"ds_vrgd.{name}" for name in ds_vrgd.__all__ if name != "__version__"}
    public |= {
        f"ds_vrgd.schedules.{name}"
        for name, value in vars(ds_vrgd.schedules).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert public - named == set()


def test_all_pages_are_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    unlisted = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name})" not in listed]
    assert unlisted == ["README.md"]
