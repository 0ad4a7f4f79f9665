"""The reader of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.engines.deepspeed.configs import read_config


def read(folder: Path, text: str) -> object:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def test_object_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, '{"zero_optimization": {"stage": 2}}') == {"zero_optimization": {"stage": 2}}


def test_error_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ds\.json is not JSON: line 3, column 1: "):
        read(tmp_path, '{\n  "a": 1,\n}')


def test_repeated_key_is_an_error_as_in_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ds\.json: Duplicate keys in DeepSpeed config: \['stage'\]"):
        read(tmp_path, '{"zero_optimization": {"stage": 1, "stage": 2}}')


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json cannot be read \(No such file or directory\)"):
        read_config(tmp_path / "absent.json")
