"""The placeholder of addresses that do not exist yet: the release check finds it, and no other stand-in is used."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECK = runpy.run_path(str(ROOT / "scripts" / "check_release.py"))


def test_a_placeholder_is_found_and_a_clean_tree_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("one\n[home](https://ds-vrgd.invalid/x)\nuntil the first release\n", encoding="utf-8")
    for command in (["init", "-q"], ["add", "page.md"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert CHECK["places"](tmp_path) == [
        "page.md:2:[home](https://ds-vrgd.invalid/x)",
        "page.md:3:until the first release",
    ]
    page.write_text("one\n", encoding="utf-8")
    assert CHECK["places"](tmp_path) == []


def test_every_image_of_the_manifests_names_the_placeholder() -> None:
    for path in (ROOT / "scripts" / "kubernetes").glob("*.yaml"):
        images = re.findall(r"image: (\S+)", path.read_text(encoding="utf-8"))
        assert all(image.startswith(f"{CHECK['PLACEHOLDER']}/") for image in images), path.name


def test_the_paper_is_named_where_it_is_cited() -> None:
    (paper,) = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert paper["url"].removeprefix("https://arxiv.org/abs/") == "2309.13681"
    assert f"({paper['url']})" in readme
    assert f"title   = {{{paper['title']}}}" in readme
    names = " and ".join(f"{each['family-names']}, {each['given-names']}" for each in paper["authors"])
    assert f"author  = {{{names}}}" in readme
