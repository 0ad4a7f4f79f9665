"""Nothing is lost: a run that is stopped, resumed and stopped again is bitwise the run that was never stopped.

All on two ranks of one spawn. Runs that are killed need processes of their own: test_kills.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from ds_vrgd.bert.errors import Interrupted, TrainingFailed
from ds_vrgd.bert.log import read_log
from ds_vrgd.bert.pretrain import pretrain
from ds_vrgd.bert.runfile import RunFile
from tests.bert import faults
from tests.bert.cases import run_settings
from tests.bert.launching import different, tensors
from tests.support.ranks import run_on_ranks

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32, stage 2": {"zero_optimization": {"stage": 2}},
    "bf16, stage 1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    # The scale overflows at first, and grows again after two good updates.
    "fp16, stage 3": {
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1},
    },
}
OPTIMIZER = {"type": "VRLAMB", "params": {"lr": 4e-3, "weight_decay": 0.01, "gamma": 0.1}}


def config(name: str) -> dict[str, Any]:
    return {"optimizer": OPTIMIZER, "gradient_clipping": 1.0, **CONFIGS[name]}


def attempt(run: RunFile, name: str, output: Path, resume: Path | None = None) -> str:
    """The last line of a run, or of what ended it early."""
    try:
        return pretrain(run, config(name), output, resume)
    except (Interrupted, TrainingFailed) as error:
        return f"{type(error).__name__}: {error}"


def runs_on_a_rank(rank: int, settings: dict[str, Any], folder: Path) -> dict[str, list[str]]:
    """Every config whole, and stopped by SIGTERM to rank 1 after updates 3, 4 (phase 1 ends) and 5; a full disk."""
    every_third = RunFile.model_validate(settings)
    no_own = RunFile.model_validate({**settings, "checkpoint_every": 100, "keep_checkpoints": 9})
    said: dict[str, list[str]] = {}
    # First of all: stage 3 replaces torch.nn.functional.linear for the rest of the process, which rounds otherwise.
    full = folder / "full"
    name = "fp32, stage 2"
    if rank == 1:
        with faults.full_disk_in_checkpoint(4):
            said["full"] = [attempt(every_third, name, full)]
    else:
        said["full"] = [attempt(every_third, name, full)]
    torch.distributed.barrier()
    said["full"].append(" ".join(sorted(path.name for path in (full / "checkpoints").iterdir())))
    torch.distributed.barrier()
    said["full"].append(attempt(every_third, name, full, full))
    for name in CONFIGS:
        whole, stopped = folder / name / "whole", folder / name / "stopped"
        said[name] = [attempt(every_third, name, whole)]
        for number, resume in ((3, None), (1, stopped), (1, stopped)):
            if rank == 1:
                with faults.sigterm_in_update(number):
                    said[name].append(attempt(no_own, name, stopped, resume))
            else:
                said[name].append(attempt(no_own, name, stopped, resume))
        said[name].append(attempt(no_own, name, stopped, stopped))
    return said


@dataclass(frozen=True)
class Runs:
    folder: Path
    said: list[dict[str, list[str]]]  # by rank


@pytest.fixture(scope="module")
def runs(corpus_folder: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("faults")
    settings = run_settings(corpus_folder, prepared_data=str(data_folder), keep_checkpoints=2)
    return Runs(folder, run_on_ranks(2, runs_on_a_rank, settings, folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_sigterm_to_one_rank_saves_and_stops_all(runs: Runs, name: str) -> None:
    output = runs.folder / name / "stopped"
    for said in runs.said:
        assert said[name][1:4] == [
            f"Interrupted: SIGTERM: saved after update {step} and stopped; go on with the same command and --resume "
            f"{output}"
            for step in (3, 4, 5)
        ]


@pytest.mark.parametrize("name", CONFIGS)
def test_stopped_before_at_and_after_the_phase_boundary_it_is_the_same_run(runs: Runs, name: str) -> None:
    """Bitwise: weights, masters, moments, GSNR average, loss scale, counters; and the losses of every update."""
    whole, stopped = (runs.folder / name / each for each in ("whole", "stopped"))
    for step in (4, 6):
        assert different(*(each / "checkpoints" / f"step-{step:06d}" for each in (whole, stopped))) == []
    losses = [
        [(record["step"], record["loss"]) for record in read_log(output) if "loss" in record]
        for output in (whole, stopped)
    ]
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]
    assert {said[name][0] for said in runs.said} == {said[name][4] for said in runs.said}


def test_the_comparison_sees_moments_gsnr_and_a_loss_scale_that_moved(runs: Runs) -> None:
    whole = runs.folder / "fp16, stage 3" / "whole"
    found = tensors(whole / "checkpoints" / "step-000006")
    assert {"exp_avg", "exp_avg_sq", "exp_avg_gsnr"} <= {place.rsplit("/", 1)[-1] for place in found}
    skipped = [record["skipped"] for record in read_log(whole) if "loss" in record]
    assert skipped == [True, False, False, False, False, False]
    scales = [float(value) for place, value in found.items() if place.endswith("cur_scale")]
    assert scales == [2.0**20, 2.0**20]  # 2**19, halved by the first update and doubled twice


@pytest.mark.parametrize("name", CONFIGS)
def test_csv_rows_are_not_repeated(runs: Runs, name: str) -> None:
    rows = (runs.folder / name / "stopped" / "csv" / "Train_loss.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]


def test_full_disk_on_one_rank_stops_all_and_leaves_the_checkpoint_before(runs: Runs) -> None:
    output = runs.folder / "full"
    stopped, left, finished = runs.said[0]["full"]
    assert stopped.startswith(
        f"TrainingFailed: checkpoint step-000004 could not be written to {output / 'checkpoints'}: rank 1: "
    )
    assert "GB are free there, and step-000003 takes " in stopped
    assert stopped.endswith(f"and go on with --resume {output}")
    assert runs.said[1]["full"] == [stopped, left, finished]
    assert left == "latest step-000003 zero_to_fp32.py zero_to_torch.py"
    assert finished == runs.said[0]["fp32, stage 2"][0]
    final = "checkpoints/step-000006"
    assert different(output / final, runs.folder / "fp32, stage 2" / "whole" / final) == []


def test_the_newest_two_checkpoints_stay(runs: Runs) -> None:
    checkpoints = runs.folder / "fp32, stage 2" / "whole" / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000004", "step-000006"]
    assert (checkpoints / "latest").read_text(encoding="utf-8") == "step-000006"
