"""Nothing is lost: a run that is stopped, resumed and stopped again is bitwise the run that was never stopped.

All on two ranks of one spawn. Runs that are killed need processes of their own: test_kills.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_vrgd.engines.deepspeed import to_universal
from ds_vrgd_recipes.bert.pretrain import Pretraining
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import Interrupted, TrainingFailed
from ds_vrgd_recipes.run.log import read_log
from ds_vrgd_recipes.run.loop import Training, train
from tests.recipes.bert import faults
from tests.recipes.bert.cases import run_settings
from tests.recipes.bert.launching import different, tensors
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

CONFIGS: dict[str, dict[str, Any]] = {
    "fp32, stage 2": {"zero_optimization": {"stage": 2}},
    "bf16, stage 1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    # The scale overflows at first, and grows again after two good updates.
    "fp16, stage 3": {
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1},
    },
}
PLAIN: dict[str, dict[str, Any]] = {"fp32, stage 0": {}}  # nothing is cut
OPTIMIZER = {"type": "VRLAMB", "params": {"lr": 4e-3, "weight_decay": 0.01, "gamma": 0.1}}


def config(name: str) -> dict[str, Any]:
    return {"optimizer": OPTIMIZER, "gradient_clipping": 1.0, **(CONFIGS | PLAIN)[name]}


def attempt(run: RunFile, name: str, output: Path, resume: Path | None = None) -> str:
    """The last line of a run, or of what ended it early."""
    try:
        return train(Pretraining(run), config(name), output, resume)
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
    with patch.object(Pretraining, "evaluate", lambda *arguments: {"held_out_masked_lm_loss": float("nan")}):
        said["ruined"] = [attempt(every_third, name, folder / "ruined")]
    keeping = RunFile.model_validate({**settings, "keep_checkpoints": 9})
    said["plain"] = [attempt(keeping, name, folder / name / "whole") for name in PLAIN]
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


def go_on_alone(rank: int, settings: dict[str, Any], folder: Path) -> dict[str, list[Path]]:
    """From what two ranks saved after update 3 on one rank: saved again at once, and trained to the end.

    Returns:
        By config the universal form of what two ranks and of what one rank saved.
    """
    run = RunFile.model_validate({**settings, "checkpoint_every": 100})

    def save_at_once(training: Training, *arguments: Any) -> None:
        checkpoint.save(training.engine, training.ranks, training.output, 3, training.description, 9)
        raise Interrupted(3, training.output)

    universal = {}
    for name in [*PLAIN, *CONFIGS]:
        source = folder / name / ("stopped" if name in CONFIGS else "whole") / "checkpoints"
        attempt(run, name, folder / name / "alone", source / "step-000003")
        if name in PLAIN:
            continue
        with patch.object(Training, "phase", save_at_once):
            attempt(run, name, folder / name / "moved", source / "step-000003")
        universal[name] = [
            to_universal(each, folder / name / f"universal {number}", "step-000003")
            for number, each in ((2, source), (1, folder / name / "moved" / "checkpoints"))
        ]
    return universal


@dataclass(frozen=True)
class Runs:
    folder: Path
    said: list[dict[str, list[str]]]  # by rank
    universal: dict[str, list[Path]]


@pytest.fixture(scope="module")
def runs(corpus_folder: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("faults")
    settings = run_settings(corpus_folder, prepared_data=str(data_folder), keep_checkpoints=2)
    said = run_on_ranks(2, runs_on_a_rank, settings, folder)
    return Runs(folder, said, run_on_ranks(1, go_on_alone, settings, folder)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_sigterm_to_one_rank_saves_and_stops_all(runs: Runs, name: str) -> None:
    output = runs.folder / name / "stopped"
    for said in runs.said:
        assert said[name][1:4] == [
            f"Interrupted: SIGTERM: saved after update {step} and stopped; resume with the same command and --resume "
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
    assert skipped[:5] == [True, False, False, False, False]
    # Halved by the first update, doubled by the fourth; the sixth doubles it again, or overflows.
    scale = 2.0**19 / 2 * 2 * (0.5 if skipped[5] else 2)
    assert [float(value) for place, value in found.items() if place.endswith("cur_scale")] == [scale, scale]


@pytest.mark.parametrize("name", CONFIGS)
def test_another_number_of_ranks_loads_the_same_state(runs: Runs, name: str) -> None:
    """Masters and every state of every parameter, bitwise."""
    two, one = (
        {path.relative_to(folder): torch.load(path, weights_only=False) for path in folder.glob("zero/*/*.pt")}
        for folder in runs.universal[name]
    )
    assert {path.name for path in two} == {"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "exp_avg_gsnr.pt", "step.pt"}
    assert two.keys() == one.keys()
    for path, saved in two.items():
        if isinstance(saved, dict):
            assert torch.equal(saved["param"], one[path]["param"]), path
        else:
            assert saved == one[path]


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_another_number_of_ranks_goes_on_with_the_same_losses(runs: Runs, name: str) -> None:
    """The same chunks, so the same run up to the order of sums."""
    whole, alone = (
        [(record["step"], record["loss"]) for record in read_log(runs.folder / name / output) if "loss" in record]
        for output in ("whole", "alone")
    )
    assert [step for step, _ in alone] == [4, 5, 6]
    tolerance = 1e-5 if "fp32" in name else 2e-3
    assert [loss for _, loss in alone] == pytest.approx([loss for _, loss in whole[3:]], rel=tolerance)
    assert not (runs.folder / name / "alone" / "checkpoints" / "universal").exists()


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
    assert stopped.endswith(f"and resume with --resume {output}")
    assert runs.said[1]["full"] == [stopped, left, finished]
    assert left == "latest step-000003 zero_to_fp32.py zero_to_torch.py"
    assert finished == runs.said[0]["fp32, stage 2"][0]
    final = "checkpoints/step-000006"
    assert different(output / final, runs.folder / "fp32, stage 2" / "whole" / final) == []


def test_ruined_weights_never_become_a_checkpoint(runs: Runs) -> None:
    for said in runs.said:
        assert said["ruined"][0].startswith("TrainingFailed: update 3: the loss is nan")
    assert not (runs.folder / "ruined" / "checkpoints").exists()


def test_the_newest_two_checkpoints_stay(runs: Runs) -> None:
    checkpoints = runs.folder / "fp32, stage 2" / "whole" / "checkpoints"
    assert sorted(path.name for path in checkpoints.glob("step-*")) == ["step-000004", "step-000006"]
    assert (checkpoints / "latest").read_text(encoding="utf-8") == "step-000006"
