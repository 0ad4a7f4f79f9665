"""The errors of ``ds-vrgd to-universal``; tests/engines/deepspeed/test_universal.py converts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_vrgd.cli.to_universal import first_fault, locked
from ds_vrgd_cli import main
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import fingerprint
from ds_vrgd_recipes.run.locks import locked_output
from ds_vrgd_recipes.run.manifest import write_manifest


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 2
    assert "has neither a file 'latest' nor shards in it" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_a_tag_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output"), "--tag", "step-7"]) == 2
    assert "there is no checkpoint 'step-7'" in capsys.readouterr().err


def test_stage_0_needs_no_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("step-7")
    assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 2
    assert "engine.load_checkpoint takes the checkpoint as it is at any number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize("output", ["output", "output/inside"])
def test_an_output_that_another_conversion_writes(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path / "output"):
        assert main(["to-universal", str(tmp_path), str(tmp_path / output)]) == 1
    assert f"another process is converting a checkpoint (process {os.getpid()} on " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_a_training_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked_output(tmp_path / "output", "training"):
        assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 1
    assert "another process is training (process " in capsys.readouterr().err
    refused = pytest.raises(InputError, match="another process is converting a checkpoint")
    with locked(tmp_path / "output"), refused, locked_output(tmp_path / "output" / "run", "training"):
        pass


def test_a_checkpoint_is_compared_with_its_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = tmp_path / "step-7"
    shards.mkdir()
    (shards / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    (tmp_path / "latest").write_text("step-7")
    write_manifest(shards, {path.name: fingerprint(path) for path in shards.glob("*.pt")})
    assert first_fault(shards) is None
    for content, fault in (
        (b"Weights", "has sha256 "),
        (b"weigh", "mp_rank_00_model_states.pt has 5 bytes, not 7. Use another checkpoint"),
    ):
        (shards / "mp_rank_00_model_states.pt").write_bytes(content)
        assert main(["to-universal", str(tmp_path), str(tmp_path / "output")]) == 2
        assert fault in capsys.readouterr().err
    (shards / "mp_rank_00_model_states.pt").unlink()
    assert "cannot be read (No such file or directory)" in str(first_fault(shards))
    (shards / "manifest.json").write_text('{"files": []}')
    assert "manifest.json is damaged (" in str(first_fault(shards))
