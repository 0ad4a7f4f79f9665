"""``ds-vrgd to-universal``: what it says when it cannot; that it can is in tests/zero/test_universal.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.cli.main import main


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 1
    assert "has neither a file 'latest' nor shards in it" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_a_tag_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output"), "--tag", "step-7"]) == 1
    assert "there is no checkpoint 'step-7'" in capsys.readouterr().err


def test_stage_0_needs_no_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("step-7")
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 1
    assert "engine.load_checkpoint takes the checkpoint as it is at any number of ranks" in capsys.readouterr().err
