"""The pages of the site: links lead somewhere, the navigation has every page, the API page every public name."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

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
    assert gathered == in_docs | {"index.md", "PAGES.md", "IMAGES.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert "](START.md)" in (tmp_path / "pages" / "index.md").read_text()  # docs/START.md, from the README
    assert (tmp_path / "pages" / "figures" / "how_it_works.svg").is_file()


def test_a_link_to_nothing_is_an_error(site_pages: dict[str, Any]) -> None:
    rewritten, site = site_pages["rewritten"], site_pages["pages"]()
    page = ROOT / "docs" / "START.md"
    assert rewritten(page, "[a](../README.md#use) `x`", site, set()) == "[a](index.md#use) `x`"
    assert rewritten(page, "```\n[a](gone.md)\n```\n", site, set()) == "```\n[a](gone.md)\n```\n"
    with pytest.raises(SystemExit, match=r"docs/START.md: the link gone.md leads to no file"):
        rewritten(page, "[a](gone.md)", site, set())


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
