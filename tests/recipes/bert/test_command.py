"""The command of a run: what is refused, by whom it is said, and what may be resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from ds_vrgd_recipes.bert.main import main
from ds_vrgd_recipes.run.files import fingerprint
from ds_vrgd_recipes.run.locks import locked_output
from ds_vrgd_recipes.run.log import read_log
from ds_vrgd_recipes.run.loop import Training
from tests.recipes.bert.cases import run_settings
from tests.recipes.bert.launching import SCRIPT, different
from tests.support.ranks import run_on_ranks

PARAMS = {"lr": 4e-3, "weight_decay": 0.01, "gamma": 0.1}
CONFIG: dict[str, Any] = {
    "optimizer": {"type": "VRLAMB", "params": PARAMS},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def with_params(**changes: Any) -> dict[str, Any]:
    return {**CONFIG, "optimizer": {"type": "VRLAMB", "params": {**PARAMS, **changes}}}


#: Refused before the data are prepared, in one line that holds these words.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "typo": (with_params(weigth_decay=0.1), "VRLAMB has no argument weigth_decay=0.1"),
    "range": (with_params(gamma=2), "gamma=2 is out of range: must be in (0, 1]"),
    "refusal": (
        {**CONFIG, "zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
        "VRLAMB cannot be exact under this configuration: - zero_optimization.elastic_checkpoint=true",
    ),
    "DeepSpeed": ({**CONFIG, "zero_optimization": {"stage": "two"}}, "two"),
    "both": ({**CONFIG, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bfloat16 and fp16 modes cannot"),
    "DeepSpeed's optimizer": (
        {**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "weigth_decay": 0.1}}},
        "weigth_decay",
    ),
}
#: A checkpoint of CONFIG is not resumed with these: the setting, the value saved and the new one.
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "gamma": (with_params(gamma=0.2), "optimizer_params.1.gamma=0.1, not 0.2, optimizer_params.2.gamma=0.1, not 0.2"),
    "gamma 1": (with_params(gamma=1), "optimizer_params.1.gamma=0.1, not 1"),
    "weight_decay": (with_params(weight_decay=0.1), "with optimizer_params.1.weight_decay=0.01, not 0.1; use"),
    "betas": (with_params(betas=[0.5, 0.999]), "optimizer_params.1.betas.1=0.9, not 0.5"),
    "gsnr_dtype": (with_params(gsnr_dtype="bfloat16"), "optimizer_params.1.gsnr_dtype=float32, not bfloat16"),
    "clipping": ({**CONFIG, "gradient_clipping": 0.5}, "with gradient_clipping=1.0, not 0.5; use"),
    "bf16": ({**CONFIG, "bf16": {"enabled": True}}, "with bf16=off, not {'enabled': True}; use"),
    "type": ({**CONFIG, "optimizer": {"type": "LAMB", "params": {"lr": 4e-3}}}, "with optimizer=VRLAMB, not LAMB; use"),
}
#: Found in the param groups, too.
OLDER = ("gamma", "weight_decay", "betas", "gsnr_dtype")


def command(folder: Path, config: Path, output: str, *more: str) -> tuple[int, str, str]:
    """Exit status, standard output, and the errors of this rank."""
    arguments = ["--config", str(config), "--run", str(folder / "run.yaml"), "--output", str(folder / output), *more]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch("ds_vrgd_recipes.run.command.leave"):
        status = main(arguments)
    torch.distributed.barrier()
    errors = err.getvalue()
    return status, out.getvalue(), errors[errors.index("error: ") :] if "error: " in errors else ""


def on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = {}
    right = folder / "right.json"
    for name in [*WRONG, *CHANGED]:
        (folder / f"{name}.json").write_text(json.dumps((WRONG | CHANGED)[name][0]))
    right.write_text(json.dumps(CONFIG))
    (folder / "overflow.json").write_text(json.dumps({**CONFIG, "fp16": {"enabled": True, "loss_scale": 2.0**60}}))
    torch.distributed.barrier()
    for name in WRONG:
        said[name] = *command(folder, folder / f"{name}.json", "wrong", "--resume", "auto"), (folder / "wrong").exists()
    said["dry"] = command(folder, right, "dry", "--dry-run", "phases.1.steps=3"), (folder / "dry").exists()
    said["dry, wrong"] = command(folder, right, "dry", "--dry-run", "phases.1.global_batch=25")
    said["dry, absent"] = command(folder, right, "dry", "--dry-run", f"corpus.path={folder / 'absent'}")
    with contextlib.ExitStack() as stack:
        if rank == 0:  # another process, as far as the lock can tell
            stack.enter_context(patch("ds_vrgd_recipes.run.locks._PATIENCE", 0.0))
            stack.enter_context(locked_output(folder / "out", "training"))
        torch.distributed.barrier()
        said["locked"] = command(folder, right, "out")
    torch.distributed.barrier()

    def killed(*arguments: Any) -> None:
        raise MemoryError("killed")

    # A start that dies between the engine and the first update, with data prepared and monitors' folders made.
    with patch.object(Training, "phase", killed), contextlib.suppress(MemoryError):
        command(folder, right, "out", "--resume", "auto")
    torch.distributed.barrier()
    said["left"] = sorted(path.name for path in (folder / "out").iterdir())
    (folder / "out" / "data" / "mine").touch()  # what is prepared once more would lose it
    said["whole"] = command(folder, right, "out", "--resume", "auto")
    said["finished"] = command(folder, right, "out", "--resume", "auto")
    for name in CHANGED:
        said[f"finished, {name}"] = command(folder, folder / f"{name}.json", "out", "--resume", "auto")
    # Nothing is left to train, in a new output.
    last = str(folder / "out" / "checkpoints" / "step-000006")
    said["nothing left"] = command(folder, right, "moved", "--resume", last)
    with patch("ds_vrgd_recipes.run.loop._MOST_SKIPPED_UPDATES", 2):  # the scale stays where every gradient overflows
        said["skipping"] = command(folder, folder / "overflow.json", "skipping")
    for name in CHANGED:
        resume = str(folder / "out" / "checkpoints" / "step-000003")
        said[name] = command(folder, folder / f"{name}.json", "changed", "--resume", resume)
    said["changed"] = (folder / "changed").exists()
    if rank == 0:
        written_by_an_older_version(folder / "out" / "checkpoints" / "step-000003", folder / "older" / "step-000003")
    torch.distributed.barrier()
    for name in OLDER:
        resume = str(folder / "older" / "step-000003")
        said[f"older, {name}"] = command(folder, folder / f"{name}.json", "resumed", "--resume", resume)
    said["older"] = command(folder, right, "resumed", "--resume", str(folder / "older" / "step-000003"))
    return said


def written_by_an_older_version(checkpoint: Path, target: Path) -> None:
    """A copy that does not say which arguments its optimizer had."""
    shutil.copytree(checkpoint, target)
    path, manifest = target / "pretraining.json", target / "manifest.json"
    state = json.loads(path.read_text())
    keys = ("model", "vocabulary_sha256", "data_sha256", "seed", "phases", "ranks", "zero_stage", "optimizer", "step")
    path.write_text(json.dumps({key: state[key] for key in keys}))
    files = json.loads(manifest.read_text())
    files["files"][path.name] = fingerprint(path)._asdict()
    manifest.write_text(json.dumps(files))


@pytest.fixture(scope="module")
def folder(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    (folder / "run.yaml").write_text(yaml.safe_dump(run_settings(corpus_folder)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(2, on_a_rank, folder)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_the_json_is_one_line_before_data_are_prepared(said: list[dict[str, Any]], name: str) -> None:
    for rank, (status, out, errors, is_there) in enumerate(one[name] for one in said):
        assert (status, out, is_there) == (2, "", False)
        if rank == 0:
            assert WRONG[name][1] in errors
            assert errors.count("\n") == 1
        else:
            assert errors == ""


def test_a_dry_run_checks_and_writes_nothing(said: list[dict[str, Any]], folder: Path) -> None:
    (status, out, errors), is_there = said[0]["dry"]
    assert (status, errors, is_there) == (0, "", False)
    assert out.splitlines() == [
        "VRLAMB, ZeRO stage 2",
        "phase 1: 4 updates of 16 sequences: ranks 2 x accumulation 4 = k 8, of micro-batch 2",
        "phase 2: 3 updates of 24 sequences: ranks 2 x accumulation 6 = k 12, of micro-batch 2",
        f"data: {folder / 'dry' / 'data'}, to be prepared",
        f"output: {folder / 'dry'}, a new run",
        "nothing was read, trained or written (--dry-run)",
    ]
    assert said[1]["dry"][0][0] == 0
    for name, expected in (("wrong", "global_batch=25 is not a multiple"), ("absent", "absent is not a folder")):
        assert [one[f"dry, {name}"][0] for one in said] == [2, 2]
        assert expected in said[0][f"dry, {name}"][2]


def test_a_model_has_a_card(said: list[dict[str, Any]], folder: Path) -> None:
    assert said[0]["whole"][0] == 0
    path = folder / "out" / "model" / "README.md"
    data, text = ModelCard.load(path).data, path.read_text(encoding="utf-8")
    evaluated = [record for record in read_log(folder / "out") if "held_out_masked_lm_loss" in record][-1]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "fill-mask")
    assert data.eval_results[0].metric_value == round(evaluated["held_out_masked_lm_loss"], 4)
    for line in (
        '| optimizer | VRLAMB, `{"weight_decay": 0.01, "gamma": 0.1}` |',
        "| gradient clipping | 1.0 |",
        "| ranks, ZeRO stage | 2, 2 |",
        "| 1 | 24 | 16 | 8 | 4 | 0.02 | 25% |",
        "| 2 | 32 | 24 | 12 | 2 | 0.01 | 1 updates |",
    ):
        assert line in text.splitlines()


def test_two_runs_do_not_share_an_output(said: list[dict[str, Any]], folder: Path) -> None:
    status, _, errors = said[0]["locked"]
    assert status == said[1]["locked"][0] == 2
    assert errors.startswith("error: another process is training (process ")
    assert f"on {socket.gethostname()}, since " in errors
    assert said[1]["locked"][2] == ""


def test_one_command_serves_the_start_that_died_and_every_later_one(said: list[dict[str, Any]], folder: Path) -> None:
    """Nothing of what was prepared is lost on the way."""
    assert said[0]["left"] == ["csv", "data", "log.jsonl", "tensorboard"]
    assert [one["whole"][0] for one in said] == [0, 0], said[0]["whole"]
    assert said[0]["whole"][1].startswith("held-out mlm loss ")
    assert (folder / "out" / "data" / "mine").exists()
    assert [record["step"] for record in read_log(folder / "out") if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert "already holds this run, finished" in said[0]["finished"][1]
    assert not (folder / "out" / ".lock").exists()
    # The monitors get events by update alone: W&B drops those that follow the engine's own, which count samples.
    assert (folder / "out" / "csv" / "Train_loss.csv").exists()
    assert not list((folder / "out" / "csv").glob("*Samples*"))


@pytest.mark.parametrize("name", CHANGED)
def test_a_finished_run_is_not_that_of_another_json(said: list[dict[str, Any]], name: str) -> None:
    """Its loss would be taken for that of the other optimizer."""
    assert [one[f"finished, {name}"][0] for one in said] == [2, 2]
    error = said[0][f"finished, {name}"][2]
    assert "holds another run, finished, with settings." in error
    assert CHANGED[name][1].removeprefix("with ").removesuffix("; use") in error.replace("settings.", "")


def test_a_finished_run_is_moved_to_another_output(said: list[dict[str, Any]], folder: Path) -> None:
    assert [one["nothing left"][0] for one in said] == [0, 0], said[0]["nothing left"]
    assert said[0]["nothing left"][1].splitlines()[-1] == said[0]["whole"][1].splitlines()[-1]
    assert (folder / "moved" / "result.json").exists()


def test_a_run_that_skips_every_update_ends(said: list[dict[str, Any]]) -> None:
    assert [one["skipping"][0] for one in said] == [1, 1]
    assert said[0]["skipping"][2].startswith("error: update 3: 3 updates in a row were skipped because gradients over")
    assert said[1]["skipping"][2] == ""


@pytest.mark.parametrize("name", CHANGED)
def test_a_checkpoint_is_not_resumed_with_other_mathematics(said: list[dict[str, Any]], name: str) -> None:
    status, _, errors = said[0][name]
    assert status == said[1][name][0] == 2
    assert CHANGED[name][1] in errors
    assert errors.count("\n") == 1
    assert errors.rstrip().endswith("settings of that run, or start anew without --resume in another --output")
    assert not said[0]["changed"]


@pytest.mark.parametrize("name", OLDER)
def test_a_checkpoint_that_says_less_is_compared_once_it_is_loaded(said: list[dict[str, Any]], name: str) -> None:
    """What DeepSpeed loads over the new arguments is what the checkpoint had."""
    status, _, errors = said[0][f"older, {name}"]
    assert status == said[1][f"older, {name}"][0] == 2
    assert CHANGED[name][1] in errors
    assert [one["older"][0] for one in said] == [0, 0], said[0]["older"]
    assert said[0]["older"][1].splitlines()[-1] == said[0]["whole"][1].splitlines()[-1]


@pytest.mark.parametrize("missing", ["--run", "--config"])
def test_a_rank_that_cannot_read_its_files_names_itself(
    folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks do not know one another yet: a file may be missing on the second host alone."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    files = {"--run": str(folder / "run.yaml"), "--config": "configs/ds_vrgd.json", missing: "absent.file"}
    assert main([*(each for pair in files.items() for each in pair), "--output", str(folder / "never")]) == 2
    expected = (
        f"error: rank 1 on {socket.gethostname()}: --{'run' if missing == '--run' else 'deepspeed_config'} absent.file"
    )
    assert capsys.readouterr().err.startswith(expected)
    assert not (folder / "never").exists()


def alone(folder: Path, output: str) -> tuple[list[str], dict[str, str]]:
    """The script as a user starts it without a launcher."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    (folder / "alone.json").write_text(json.dumps(CONFIG))
    arguments = ["--config", str(folder / "alone.json"), "--run", str(folder / "run.yaml"), "--resume", "auto"]
    command = [sys.executable, str(SCRIPT), *arguments, "--output", str(folder / output)]
    return command, variables | {"DS_ACCELERATOR": "cpu"}


@pytest.mark.slow
def test_the_script_without_a_launcher_is_one_rank(folder: Path) -> None:
    command, variables = alone(folder, "alone")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("held-out mlm loss ")


@pytest.mark.slow
def test_killed_and_started_again_while_it_lives_and_after(folder: Path) -> None:
    """Killed with -9 twice: when the output has but its lock, and when a first checkpoint is there."""
    command, variables = alone(folder, "killed")

    def start(*until: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 240
        while not any((folder / "killed" / name).exists() for name in until):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        return process

    first = start("data.partial", "data")
    first.kill()
    first.wait()
    again = start("checkpoints/step-000003")
    again.send_signal(signal.SIGSTOP)  # as a node that hangs: it lives, and does nothing
    second = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert second.returncode == 2
    assert f"error: another process is training (process {again.pid} on {socket.gethostname()}, since " in second.stderr
    again.kill()
    again.wait()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    whole, _ = alone(folder, "whole")
    never = subprocess.run(whole, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines()[-1] == never.stdout.splitlines()[-1]
    assert different(*(folder / name / "checkpoints" / "step-000006" for name in ("killed", "whole"))) == []
