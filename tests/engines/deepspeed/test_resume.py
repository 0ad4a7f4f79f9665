"""A run that was saved and resumed in new processes is the run that never stopped, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vrgd.doctor.weights import whole_weights
from ds_vrgd.engines.deepspeed import to_universal
from ds_vrgd.optim import OPTIMIZERS
from tests.engines.deepspeed.cases import ENGINES, identify
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences, everything, moving_config, train, whole_state
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


def load_weights_alone(rank: int, folder: Path) -> list[str]:
    """Return which loads of the earlier of two checkpoints, without its state, did not bring its weights to stay."""
    wrong = []
    for stage, dtype, accum_dtype in ENGINES:
        case = Case("VRAdamW", stage, dtype, 2, accum_dtype)
        name, engine = identify(case), build(case, WORLD, moving_config(case, WORLD))
        for step in range(2):
            train(engine, case, rank, WORLD, range(step, step + 1))
            engine.save_checkpoint(str(folder / name), tag=f"step{step}")
            if step == 0:
                with whole_weights(engine) as weights:
                    saved = {weight: value.clone() for weight, value in weights.items()}
        engine.destroy()
        if stage and rank == 0:
            to_universal(folder / name, folder / f"{name}-universal", "step0")
        torch.distributed.barrier()
        for of in (name, f"{name}-universal")[: 1 + (stage > 0)]:
            for alone in ({"load_optimizer_states": False}, {"load_module_only": True}):
                universal = {"checkpoint": {"load_universal": True}} if of != name else {}
                engine = build(case, WORLD, moving_config(case, WORLD, **universal))
                engine.load_checkpoint(str(folder / of), tag="step0", **alone)
                masters = whole_state(engine)["fp32"]
                with whole_weights(engine) as weights:
                    loaded = {weight: value.clone() for weight, value in weights.items()}
                    kept = {n: w.to(loaded[n].dtype).view_as(loaded[n]).equal(loaded[n]) for n, w in masters.items()}
                if differences(saved, loaded) or not all(kept.values()):
                    wrong.append(f"{of}, {alone}")
                engine.destroy()
    return wrong


@pytest.mark.slow
def test_weights_alone_are_those_of_the_checkpoint_and_stay(tmp_path: Path) -> None:
    assert run_on_ranks(WORLD, load_weights_alone, tmp_path)[0] == []
