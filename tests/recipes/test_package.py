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


def test_the_wheel_has_all_run_files_and_modules(tmp_path: Path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.partition(".")[0]) < 77:
        pytest.skip("recipes/pyproject.toml needs setuptools 77")
    unwanted = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", symlinks=True, ignore=unwanted)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "LICENSE", tmp_path)
    sdist = build("build_sdist", tmp_path / "recipes", tmp_path)
    with tarfile.open(sdist) as archive:
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
    link = ROOT / "recipes" / "ds_vrgd_recipes" / "configs"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "configs"
