"""One version: whoever makes a tag finds it the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import ds_vrgd
import ds_vrgd_recipes

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "project, package", [("pyproject.toml", ds_vrgd), ("recipes/pyproject.toml", ds_vrgd_recipes)], ids=str
)
def test_distribution_and_package_have_the_version_of_the_changelog(project: str, package: object) -> None:
    stated = tomllib.loads((ROOT / project).read_text(encoding="utf-8"))["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == stated == package.__version__  # type: ignore[attr-defined]


def test_citation_has_the_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1].strip("\"'") == ds_vrgd.__version__
