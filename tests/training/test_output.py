"""Nothing in an output folder is ever overwritten by another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.training.errors import InputError
from ds_vrgd.training.output import AUTO, check_output, finish
from ds_vrgd.training.runfile import Section


class RunFile(Section):
    seed: int = 3


@pytest.fixture
def run() -> RunFile:
    return RunFile()


def test_new_empty_and_prepared_folders_are_fine(run: RunFile, tmp_path: Path) -> None:
    assert check_output(run, tmp_path / "new", None) is None
    assert not (tmp_path / "new").exists()
    (tmp_path / "data").mkdir()
    assert check_output(run, tmp_path, None) is None


def test_a_finished_run_is_reported_not_repeated(run: RunFile, tmp_path: Path) -> None:
    finish(run, tmp_path, "held-out mlm loss 1.0 (unigram entropy 2.0)")
    report = check_output(run, tmp_path, None)
    assert report is not None
    assert "already holds this run, finished: result.json. Nothing was overwritten." in report
    assert report.splitlines()[-1] == "held-out mlm loss 1.0 (unigram entropy 2.0)"
    with pytest.raises(InputError, match="holds another run, finished"):
        check_output(run.model_copy(update={"seed": 8}), tmp_path, None)


def test_an_unfinished_run_needs_resume(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000003", encoding="utf-8")
    with pytest.raises(InputError, match="holds an unfinished run; go on with it by --resume"):
        check_output(run, tmp_path, None)
    with pytest.raises(InputError, match="holds an unfinished run"):
        check_output(run, tmp_path, tmp_path.parent / "elsewhere")
    for inside in (".", "checkpoints", "checkpoints/step-000003"):
        assert check_output(run, tmp_path, tmp_path / inside) is None


def test_a_run_that_ended_before_its_first_checkpoint(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(InputError, match=r"ended before its first checkpoint; remove log\.jsonl from it and"):
        check_output(run, tmp_path, None)


def test_anything_else_is_named(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"is not empty \(thesis\.tex\); remove it or give another --output"):
        check_output(run, tmp_path, None)
    with pytest.raises(InputError, match=r"thesis\.tex is a file"):
        check_output(run, tmp_path / "thesis.tex", None)


def test_auto_goes_on_with_what_a_run_has_begun_and_with_nothing_else(run: RunFile, tmp_path: Path) -> None:
    assert check_output(run, tmp_path / "new", AUTO) is None
    (tmp_path / "log.jsonl").touch()  # before its first checkpoint
    assert check_output(run, tmp_path, AUTO) is None
    (tmp_path / "log.jsonl").rename(tmp_path / "thesis.tex")
    with pytest.raises(InputError, match=r"is not empty \(thesis\.tex\)"):
        check_output(run, tmp_path, AUTO)
    (tmp_path / "checkpoints").mkdir()
    assert check_output(run, tmp_path, AUTO) is None
