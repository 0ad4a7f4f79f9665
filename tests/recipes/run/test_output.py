"""Nothing in an output folder is ever overwritten by another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.output import AUTO, check_output, finish
from ds_vrgd_recipes.run.runfile import Section

VRLAMB: dict[str, Any] = {"optimizer": "VRLAMB", "optimizer_params": [{"gamma": 0.1}], "zero_stage": 2}


class RunFile(Section):
    seed: int = 3
    prepared_data: Path | None = None


@pytest.fixture
def run() -> RunFile:
    return RunFile()


def test_new_empty_and_prepared_folders_are_fine(run: RunFile, tmp_path: Path) -> None:
    assert check_output(run, VRLAMB, tmp_path / "new", None) is None
    assert not (tmp_path / "new").exists()
    (tmp_path / "data").mkdir()
    assert check_output(run, VRLAMB, tmp_path, None) is None


def test_a_finished_run_is_reported_not_repeated(run: RunFile, tmp_path: Path) -> None:
    finish(run, VRLAMB | {"ranks": 2}, tmp_path, "held-out mlm loss 1.0 (unigram entropy 2.0)")
    report = check_output(run, VRLAMB | {"ranks": 4}, tmp_path, None)
    assert report is not None
    assert "already holds this run, finished: result.json. Nothing was overwritten." in report
    assert report.splitlines()[-1] == "held-out mlm loss 1.0 (unigram entropy 2.0)"
    with pytest.raises(InputError, match=r"another run, finished, with run\.seed=3, not 8; give another --output"):
        check_output(run.model_copy(update={"seed": 8}), VRLAMB, tmp_path, None)
    with pytest.raises(InputError, match=r"with settings\.optimizer_params\.1\.gamma=0\.1, not 1\.0; give another"):
        check_output(run, VRLAMB | {"optimizer_params": [{"gamma": 1.0}]}, tmp_path, None)
    with pytest.raises(InputError, match=r"finished, with settings\.optimizer=VRLAMB, not LAMB"):
        check_output(run, VRLAMB | {"optimizer": "LAMB"}, tmp_path, None)
    (tmp_path / "result.json").write_text(json.dumps({"run": run.model_dump(mode="json"), "summary": "an older one"}))
    assert "an older one" in str(check_output(run, VRLAMB, tmp_path, None))


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"run": 3}', b"[" * 100_000])
def test_a_damaged_result_is_named(run: RunFile, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(InputError, match=r"a finished run whose result\.json is damaged .*; give another --output"):
        check_output(run, VRLAMB, tmp_path, AUTO)


def test_an_unfinished_run_needs_resume(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-000003", encoding="utf-8")
    with pytest.raises(InputError, match="holds an unfinished run; resume it with --resume"):
        check_output(run, VRLAMB, tmp_path, None)
    with pytest.raises(InputError, match="holds an unfinished run"):
        check_output(run, VRLAMB, tmp_path, tmp_path.parent / "elsewhere")
    for inside in (".", "checkpoints", "checkpoints/step-000003"):
        assert check_output(run, VRLAMB, tmp_path, tmp_path / inside) is None


def test_a_run_that_ended_before_its_first_checkpoint(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match=r"ended before its first checkpoint; begin it again with --resume auto, or"):
        check_output(run, VRLAMB, tmp_path, None)
    assert check_output(run, VRLAMB, tmp_path, AUTO) is None


@pytest.mark.parametrize("resume", [None, AUTO, Path("elsewhere")])
@pytest.mark.parametrize(
    "left",
    [
        ["data"],
        ["csv/Train_loss.csv", "tensorboard/events"],  # killed between the engine and the first update
        ["log.jsonl", "mine/Train_loss.csv", "data"],  # a monitor's folder that the JSON names
        ["data", "log.jsonl", "csv", "tensorboard", "checkpoints/step-000003.partial/model.pt"],
        ["checkpoints/universal.partial/zero"],  # while a checkpoint of another run was being cut anew
        ["tokens/manifest.json", "tensorboard"],  # the run file's own folder for the data
    ],
)
def test_a_start_that_died_early_is_begun_again(tmp_path: Path, left: list[str], resume: Path | None) -> None:
    """With and without --resume: there is nothing to lose."""
    for name in left:
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch() if "." in path.name else path.mkdir()
    assert check_output(RunFile(prepared_data=tmp_path / "out" / "tokens"), VRLAMB, tmp_path / "out", resume) is None


def test_a_run_inside_the_output_of_another(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "log.jsonl").touch()
    for inside in ("one/two", "one/checkpoints/two"):
        with pytest.raises(InputError, match=r"two is inside .*one, which is the output of another run"):
            check_output(run, VRLAMB, tmp_path / inside, None)
    assert check_output(run, VRLAMB, tmp_path / "two", None) is None


def test_anything_else_is_named(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for data in ("data", "csv"):  # not to be removed with it
        (tmp_path / data).mkdir()
        with pytest.raises(InputError, match=r"holds thesis\.tex, which no run has written; move that elsewhere, or"):
            check_output(run, VRLAMB, tmp_path, None)
    with pytest.raises(InputError, match=r"thesis\.tex is a file"):
        check_output(run, VRLAMB, tmp_path / "thesis.tex", None)


def test_auto_goes_on_with_what_a_run_has_begun_and_with_nothing_else(run: RunFile, tmp_path: Path) -> None:
    assert check_output(run, VRLAMB, tmp_path / "new", AUTO) is None
    (tmp_path / "log.jsonl").touch()  # before its first checkpoint
    assert check_output(run, VRLAMB, tmp_path, AUTO) is None
    (tmp_path / "log.jsonl").rename(tmp_path / "thesis.tex")
    with pytest.raises(InputError, match=r"holds thesis\.tex, which no run has written"):
        check_output(run, VRLAMB, tmp_path, AUTO)
    (tmp_path / "checkpoints" / "step-000003").mkdir(parents=True)
    assert check_output(run, VRLAMB, tmp_path, AUTO) is None
