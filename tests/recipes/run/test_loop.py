"""The loop itself: what an update is, what ends a run, and a run that an older version has begun."""

from __future__ import annotations

import math
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd_recipes.clicks.runfile import RunFile
from ds_vrgd_recipes.clicks.train import Clicks
from ds_vrgd_recipes.run.errors import TrainingFailed
from ds_vrgd_recipes.run.launch import Batches
from ds_vrgd_recipes.run.log import read_log
from ds_vrgd_recipes.run.loop import Objective, Place, PlainEngine, Updates, train
from tests.recipes.clicks.cases import run_settings, write_files
from tests.support.ranks import run_on_ranks

#: Checkpoint after update 3 of 8, and the losses, of a run of version 0.1.0 (commit 76afb7a) with these settings.
OLDER = Path(__file__).with_name("older_run.tar.xz")
OLDER_SETTINGS = {"lr": 0.01, "model": {"embedding_dim": 2, "bottom_mlp": [4, 2], "top_mlp": [4]}}
OLDER_CONFIG = {
    "optimizer": {"type": "VRLAMB", "params": {"lr": 0.01, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 2},
}


class Numbers(Objective):
    """Two phases over four numbers; the loss is the weight times their mean."""

    run = SimpleNamespace(batches=[Batches(4, 2), Batches(4, 2)])
    phases = (3, 60)
    values = ("near_loss", "far_loss", "share")
    unit = "numbers"
    way_out = "lower lr, in {output}"

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.places: list[Place] = []

    def batches(self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device) -> Iterator[Tensor]:
        for _ in range(first_step, self.phases[phase]):
            yield torch.tensor([1.0, 2.0])
            yield torch.tensor([3.0, 6.0])

    def lr(self, phase: int, step: int) -> float:
        return 0.5 / (step + 1)

    def loss(self, engine: Any, batch: Tensor, place: Place) -> tuple[Tensor, tuple[Tensor, ...]]:
        self.places.append(place)
        loss = self.scale * engine(batch[:, None]).mean()
        return loss, (loss, 2 * loss, torch.tensor(0.5))


def updates(task: Numbers, **changes: Any) -> Updates:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    engine = PlainEngine(model, torch.optim.SGD(model.parameters(), lr=9.0), accumulation=2, clipping=math.inf)
    return Updates(task=task, engine=engine, silent=True, **changes)


def test_an_update_steps_on_the_mean_of_its_micro_batches_and_is_recorded() -> None:
    task = Numbers()
    made = updates(task)
    records = [record for record, _ in made.all(0, 1)]
    # The gradient is the mean of 1, 2, 3, 6; update 1 of the phase has lr 0.25, update 2 a third of 0.5.
    assert made.engine.module.weight.item() == pytest.approx(1 - 0.25 * 3 - 0.5 / 3 * 3)
    assert [record["step"] for record in records] == [2, 3]
    assert records[0] | {"numbers_per_second": 0, "memory_gb": 0} == {
        "step": 2, "near_loss": 3.0, "far_loss": 6.0, "share": 0.5, "loss": 9.0, "lr": 0.25, "numbers_per_second": 0,
        "memory_gb": 0, "skipped": False,
    }  # fmt: skip
    assert task.places == [Place(0, step, micro_batch) for step in (1, 2) for micro_batch in (0, 1)]
    record, _ = next(made.all(1, 0))
    assert record["step"] == 4


def test_a_rank_that_was_asked_to_stop_says_so_after_the_update() -> None:
    made = updates(Numbers())
    stops = []
    for record, stop in made.all(0):
        stops.append(stop)
        made.stop.requested = record["step"] == 2
    assert stops == [False, False, True]


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(scale: float) -> None:
    with pytest.raises(TrainingFailed, match=rf"update 1: the loss is {scale}; lower lr, in /out/\{{x\}}"):
        list(updates(Numbers(scale), output=Path("/out/{x}")).all(0))


def test_updates_that_are_skipped_for_ever_end_the_run() -> None:
    made = updates(Numbers())
    made.engine.optimizer.overflow = True
    done = []
    with pytest.raises(TrainingFailed, match=r"update 54: 51 updates in a row were skipped .*; lower lr, or use bf16"):
        done.extend(record["skipped"] for record, _ in made.all(1))
    assert done == [True] * 50


def test_one_update_that_is_not_skipped_counts_anew() -> None:
    made = updates(Numbers())
    for record, _ in made.all(1):
        made.engine.optimizer.overflow = record["step"] % 40 != 0
    assert record["step"] == 63


def go_on(rank: int, folder: str) -> None:
    settings = run_settings(Path(folder, "day_0"), Path(folder, "day_1"), **OLDER_SETTINGS)
    train(Clicks(RunFile.model_validate(settings)), OLDER_CONFIG, Path(folder, "new"), Path(folder, "older"))


def test_a_run_that_an_older_version_has_begun_is_resumed(tmp_path: Path) -> None:
    """Its checkpoints are found, fit, load, and lead to the losses that it had."""
    write_files(tmp_path)
    with tarfile.open(OLDER) as archive:
        archive.extractall(tmp_path / "older", filter="data")
    run_on_ranks(2, go_on, str(tmp_path))
    expected = [record["loss"] for record in read_log(tmp_path / "older") if record["step"] > 3]
    resumed = [record["loss"] for record in read_log(tmp_path / "new") if "loss" in record]
    assert len(resumed) == 5
    assert resumed == pytest.approx(expected, rel=1e-6)
