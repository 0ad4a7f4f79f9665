"""Run files by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd_recipes.installed import CONFIGS, config_path


@pytest.mark.parametrize("name", ["bert-large/64k-32k.yaml", "configs/bert-large/64k-32k.yaml"])
def test_a_name_is_that_of_an_installed_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path(name) == CONFIGS / "bert-large" / "64k-32k.yaml"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()
    assert config_path(name) == Path(name)  # the user's own file counts


@pytest.mark.parametrize("name", ["no-such.yaml", "configs", "/demo.yaml", "../configs/demo.yaml", "bert-large"])
def test_anything_else_is_left_for_the_error_of_its_reader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_path(name) == Path(name)
