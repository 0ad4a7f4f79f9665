"""Checkpoints carried over to another number of ranks: every element of every state, bit for bit.

Twelve chunks a step at every number of ranks, so that the run that goes on elsewhere is the run that never stopped.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_vrgd.cli.main import main
from ds_vrgd.doctor.weights import whole_weights
from ds_vrgd.optim import OPTIMIZERS
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences, moving_config, options, train, whole_state
from tests.support.trajectory import Case, build
from tests.zero.cases import identify

CHUNKS, STEPS = 12, 3

#: Every wrapper that cuts state over ranks.
WRAPPERS: tuple[tuple[int, str, str | None], ...] = (
    (1, "fp16", None),
    (1, "bf16", "fp32"),
    (2, "bf16", None),
    (3, "fp16", None),
)
HALF = {"gsnr_dtype": "bfloat16"}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}

#: A case, and what is different where it goes on.
Pair = tuple[Case, dict[str, Any]]


def some() -> dict[str, Pair]:
    names = list(OPTIMIZERS)
    pairs: list[Pair] = [
        (Case(names[(index + 2 * shift) % len(names)], *engine[:2], 1, engine[2]), {})
        for index, (engine, shift) in enumerate(product(WRAPPERS, (0, 1)))
    ]
    pairs += [
        (Case("VRLAMB", 2, "fp32", 1, zero={"round_robin_gradients": True}, arguments=HALF), {}),
        (Case("VRAdamW", 2, "fp32", 1, zero={"parameter_alignment": True}), {"zero": OFFLOAD}),
        (Case("VRLAMB", 3, "fp32", 1, zero=OFFLOAD, arguments=HALF), {"zero": {"sub_group_size": 150}}),
        (Case("VRAdam", 3, "bf16", 1, zero={"stage3_param_persistence_threshold": 10_000}), {}),
        (Case("VRLAMB", 2, "bf16", 1), {"stage": 3}),
        (Case("VRLAMB", 3, "bf16", 1, arguments=HALF), {"stage": 1, "accum_dtype": "fp32"}),
    ]
    return named(pairs)


def all_others() -> dict[str, Pair]:
    return named(
        [(Case(name, stage, dtype, 1, accum), {}) for name, (stage, dtype, accum) in product(OPTIMIZERS, WRAPPERS)]
    )


def named(pairs: list[Pair]) -> dict[str, Pair]:
    return {f"{index}-{identify(case)}": (case, changes) for index, (case, changes) in enumerate(pairs)}


def engine_of(case: Case, world: int, buffer: float, universal: bool) -> Any:
    """An engine with a buffer, too."""
    more: dict[str, Any] = {"checkpoint": {"load_universal": True}} if universal else {}
    engine = build(case, world, moving_config(case, world, **more))
    engine.module.register_buffer("seen", torch.full((3,), buffer, device=engine.device))
    return engine


def taken_down(engine: Any) -> dict[str, Any]:
    with whole_weights(engine) as weights:
        model = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
    state = whole_state(engine)
    steps = {float(step) for step in state.pop("step", {}).values()}  # sub-groups may be others
    return {
        "state": state,
        "step": steps,
        "model": model,
        "options": options(engine),
        "scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
        "schedule": engine.lr_scheduler.state_dict(),
        "counts": (engine.global_steps, engine.skipped_steps),
        "buffer": engine.module.seen.cpu().clone(),
    }


def freeze_other_weights(engine: Any) -> None:
    """Frozen weights that building the model does not give."""
    weight = engine.module.frozen.weight
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=hasattr(weight, "ds_id")):
        weight.data.mul_(2.0)


def start(rank: int, world: int, pairs: dict[str, Pair], folder: Path) -> dict[str, Any]:
    """Train, save, and train one step more."""
    found = {}
    for name, (case, _) in pairs.items():
        case = replace(case, accumulation=CHUNKS // world)
        engine = engine_of(case, world, 7.0, False)
        freeze_other_weights(engine)
        train(engine, case, rank, world, range(STEPS))
        engine.save_checkpoint(str(folder / "saved" / name), client_state={"note": name})
        found[name] = (taken_down(engine), one_more(engine, case, rank, world))
        engine.destroy()
    return found


def go_on(rank: int, world: int, pairs: dict[str, Pair], folder: Path) -> dict[str, Any]:
    """Load, train one step, and save again."""
    found = {}
    for name, (case, changes) in pairs.items():
        case = replace(case, accumulation=CHUNKS // world, **changes)
        engine = engine_of(case, world, 0.0, True)
        _, client_state = engine.load_checkpoint(str(folder / "universal" / name))
        assert client_state["note"] == name
        found[name] = (taken_down(engine), one_more(engine, case, rank, world))
        engine.destroy()
    return found


def one_more(engine: Any, case: Case, rank: int, world: int) -> dict[str, torch.Tensor]:
    train(engine, case, rank, world, range(STEPS, STEPS + 1))
    return whole_state(engine)["fp32"]


def check(before: Any, after: Any, pair: Pair) -> None:
    """What was loaded is what was saved, and one step more is the same step."""
    case, _ = pair
    (saved, continued), (loaded, resumed) = before, after
    assert set(saved["state"]) == set(loaded["state"]) == {"fp32", *expected_states(case)}
    assert saved["step"] == ({float(STEPS)} if "exp_avg" in saved["state"] else set())
    assert differences(saved, loaded) == []
    moved = torch.cat([(continued[name] - weight).flatten() for name, weight in saved["state"]["fp32"].items()]).norm()
    error = torch.cat([(continued[name] - resumed[name]).flatten() for name in continued]).norm()
    # In observe mode and bf16 DeepSpeed's own mean is rounded differently at another number of ranks.
    assert error <= (1e-4 if case.dtype == "fp32" else 2e-2) * moved
    assert moved > 0


def expected_states(case: Case) -> set[str]:
    if case.optimizer in ("VRSGD",):
        return set()
    if case.optimizer in ("VRMomentum", "VRLARS", "LARS"):
        return {"momentum_buffer"}
    return {"exp_avg", "exp_avg_sq"} | ({"exp_avg_gsnr"} if OPTIMIZERS[case.optimizer].reduces_variance else set())


def carried_over(pairs: dict[str, Pair], first: int, then: int, folder: Path) -> dict[str, tuple[Any, Any]]:
    before = run_on_ranks(first, start, first, pairs, folder)[0]
    for name in pairs:
        assert main(["to-universal", str(folder / "saved" / name), str(folder / "universal" / name)]) == 0
    after = run_on_ranks(then, go_on, then, pairs, folder)[0]
    return {name: (before[name], after[name]) for name in pairs}


@pytest.fixture(scope="module")
def two_to_three(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return carried_over(some(), 2, 3, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", some())
def test_two_ranks_to_three(two_to_three: dict[str, tuple[Any, Any]], name: str) -> None:
    check(*two_to_three[name], some()[name])
