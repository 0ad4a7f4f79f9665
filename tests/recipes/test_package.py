"""The wheel of the recipes has every run file, as it is in ``configs/``, and every module."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ds_vrgd
import ds_vrgd_recipes
from ds_vrgd_recipes.installed import CONFIGS

ROOT = Path(__file__).parents[2]

# What `python -m build` does, without an environment of its own: the wheel is built from the sdist.
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, project: Path, output: Path) -> Path:
    command = [sys.executable, "-c", BUILD, what, str(output)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is absent from the `packages` configuration" not in done.stderr
    return output / done.stdout.splitlines()[-1]


def contents(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob(pattern) if path.is_file()}


@pytest.mark.parametrize("through_sdist", [True, False])
def test_the_wheel_has_all_run_files_and_modules(through_sdist: bool, tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("recipes/pyproject.toml needs setuptools 77")
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=unwanted)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    source = tmp_path / "recipes"
    if through_sdist:
        with tarfile.open(build("build_sdist", source, tmp_path)) as archive:
            archive.extractall(tmp_path / "sdist", filter="data")
        (source,) = (tmp_path / "sdist").iterdir()
    with zipfile.ZipFile(build("build_wheel", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "wheel")
    installed = tmp_path / "wheel" / "ds_vrgd_recipes"
    assert contents(installed / "configs", "**/*") == contents(ROOT / "configs", "**/*")
    assert contents(installed, "**/*.py") == contents(ROOT / "recipes" / "ds_vrgd_recipes", "**/*.py")


def test_both_distributions_have_one_version() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    written = [tomllib.loads((ROOT / each / "pyproject.toml").read_text())["project"] for each in (".", "recipes")]
    assert {each["version"] for each in written} == {ds_vrgd.__version__} == {ds_vrgd_recipes.__version__}


def test_the_repository_has_each_run_file_once() -> None:
    assert CONFIGS == ROOT / "configs"


def test_nothing_is_a_link() -> None:
    """Archives and checkouts that cannot keep a link turn it into a text file."""
    others = (".git", "out")
    folders = [each for each in ROOT.iterdir() if each.is_dir() and each.name not in others]
    folders = [each for each in folders if not (each / "pyvenv.cfg").exists()]
    assert [path for folder in folders for path in folder.rglob("*") if path.is_symlink()] == []
    assert (ROOT / "recipes" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
