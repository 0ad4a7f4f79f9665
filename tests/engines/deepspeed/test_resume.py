"""A run that was saved and resumed in new processes is the run that never stopped, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd.optim import OPTIMIZERS
from tests.engines.deepspeed.cases import ENGINES, identify
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences, everything, moving_config, train
from tests.support.trajectory import Case, build

WORLD, SAVED_AT, STEPS = 2, 2, 4
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
HALF = {"gsnr_dtype": "bfloat16"}


def some() -> dict[str, Case]:
    """Return cases of every wrapper and dtype, the optimizers in turn, and settings that keep state differently."""
    names = list(OPTIMIZERS)
    cases = [
        Case(names[index % len(names)], stage, dtype, 2, accum_dtype)
        for index, (stage, dtype, accum_dtype) in enumerate(ENGINES)
    ]
    cases += [
        Case("VRLAMB", 1, "bf16", 2, reduction="observe"),
        Case("VRAdamW", 2, "bf16", 2, reduction="observe", arguments=HALF),
        Case("VRAdam", 3, "bf16", 2, reduction="observe"),
        Case("VRLAMB", 1, "bf16", 2, "fp32", arguments=HALF),
        Case("VRLAMB", 2, "fp16", 2, zero=OFFLOAD, arguments=HALF),
        Case("VRAdamW", 3, "fp16", 2, zero=OFFLOAD, arguments=HALF),
        Case("VRLAMB", 2, "fp32", 2, zero={"round_robin_gradients": True}),
        Case("VRLAMB", 3, "bf16", 2, zero={"stage3_param_persistence_threshold": 10_000}, arguments=HALF),
    ]
    return {f"{index}-{identify(case)}": case for index, case in enumerate(cases)}


def all_others() -> dict[str, Case]:
    cases = [
        Case(optimizer, stage, dtype, 2, accum_dtype, reduction=reduction)
        for optimizer, (stage, dtype, accum_dtype), reduction in product(OPTIMIZERS, ENGINES, ("auto", "observe"))
        if OPTIMIZERS[optimizer].reduces_variance or reduction == "auto"
    ]
    return {identify(case): case for case in cases}


def run_and_save(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        engine = build(case, WORLD, moving_config(case, WORLD))
        train(engine, case, rank, WORLD, range(SAVED_AT))
        engine.save_checkpoint(str(folder / name), client_state={"note": name})
        train(engine, case, rank, WORLD, range(SAVED_AT, STEPS))
        found[name] = everything(engine)
        engine.destroy()
    return found


def resume(rank: int, cases: dict[str, Case], folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        engine = build(case, WORLD, moving_config(case, WORLD))
        _, client_state = engine.load_checkpoint(str(folder / name))
        assert client_state["note"] == name
        train(engine, case, rank, WORLD, range(SAVED_AT, STEPS))
        found[name] = everything(engine)
        engine.destroy()
    return found


def differing(cases: dict[str, Case], folder: Path) -> dict[str, list[str]]:
    straight = run_on_ranks(WORLD, run_and_save, cases, folder)
    resumed = run_on_ranks(WORLD, resume, cases, folder)
    for name, case in cases.items():
        for found in straight:  # that the test can fail: everything is there, and moves
            assert any(found[name]["masters"])
            assert found[name]["steps"] == (STEPS, 0)
            assert case.dtype != "fp16" or found[name]["loss_scale"] > 2.0**case.loss_scale_power
    return {
        name: [
            f"rank {rank}{where}"
            for rank, pair in enumerate(zip(straight, resumed, strict=True))
            for where in differences(pair[0][name], pair[1][name])
        ]
        for name in cases
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return differing(some(), tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", some())
def test_resume_is_bitwise(found: dict[str, list[str]], name: str) -> None:
    assert found[name] == []


@pytest.mark.slow
def test_resume_is_bitwise_for_every_optimizer_in_every_engine(tmp_path: Path) -> None:
    assert {name: where for name, where in differing(all_others(), tmp_path).items() if where} == {}
