"""A run that moves from ZeRO to FSDP2 through ``to-universal``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.weights import master_weights
from ds_vrgd.engines.deepspeed import CheckpointError, to_universal
from ds_vrgd.engines.fsdp import load_universal
from tests.engines.fsdp.test_checkpoints import everything
from tests.engines.fsdp.training import Case, build, full, window
from tests.support import trajectory
from tests.support.model import batches
from tests.support.ranks import run_on_ranks

WORLD, ACCUMULATION = 2, 2
NAMES = ("VRLAMB", "VRAdamW", "LARS")


def moved(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: _moved(rank, name, folder / name) for name in NAMES}


def _moved(rank: int, name: str, folder: Path) -> dict[str, Any]:
    """Train under ZeRO-2, convert, load under FSDP2; return what differs, and how far both runs are apart later."""
    engine = trajectory.build(trajectory.Case(name, 2, "fp32", ACCUMULATION), WORLD)

    def train(steps: range) -> None:
        for step in steps:
            for tokens in batches(step, ACCUMULATION * WORLD)[rank::WORLD]:
                engine.backward(engine(tokens))
                engine.step()

    train(range(2))
    engine.save_checkpoint(str(folder), tag="now")
    if rank == 0:
        to_universal(folder, folder / "universal")
    dist.barrier()
    train(range(2, 4))
    right = master_weights(engine)
    engine.destroy()
    case = Case(name, "fp32", WORLD, ACCUMULATION)
    model, optimizer = build(case)
    converted = folder / "universal" / "now"
    with pytest.raises(CheckpointError, match=f"is none itself: give {converted}$"):
        load_universal(converted.parent, model, optimizer)
    load_universal(converted, model, optimizer)
    found = everything(model, optimizer)
    layers = json.loads((converted / "ds_vrgd_universal.json").read_text())["layers"]
    differ, compared = [], 0
    for layer, of in layers.items():
        for key in ("fp32", *of["states"], *of["scalars"]):
            value = torch.load(converted / "zero" / layer / f"{key}.pt", weights_only=True)
            value = value["param"] if isinstance(value, dict) else torch.as_tensor(value)
            own = found[layer if key == "fp32" else f"{layer} {key}"]
            compared += 1
            differ += [] if torch.equal(own.double(), value.double()) else [f"{layer} {key}"]
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(2, 4):
        window(case, model, step)
        optimizer.step()
        optimizer.zero_grad()
    weights = full(model)
    error = norm_of([weights[layer].double().flatten() - master.double() for layer, master in right.items()])
    return {"differ": differ, "compared": compared, "rates": rates, "frozen": sorted(set(weights) - set(right)),
            "apart": error / norm_of([master.double() for master in right.values()])}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(WORLD, moved, tmp_path_factory.mktemp("moved"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_moves_from_zero_to_fsdp2(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    states = {"VRLAMB": 5, "VRAdamW": 5, "LARS": 2}[name]
    for of_rank in found:
        seen = of_rank[name]
        assert seen["differ"] == []
        assert seen["compared"] == 9 * states
        assert seen["apart"] <= 1e-6
        assert seen["rates"] == [trajectory.ARGUMENTS[name]["lr"]] * 2
        assert seen["frozen"] == ["frozen.bias", "frozen.weight"]
