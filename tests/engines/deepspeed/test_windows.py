"""The things that a program may do between two steps of an engine, and those it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd.doctor.reference import DenseOptimizer
from tests.support.model import OutOfMemory, batches, make_model
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import (
    Case,
    build,
    chunk_gradients,
    master_weights,
    reference_groups,
    relative_error,
    whole_weights,
)

WORLD, ACCUMULATION = 2, 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
MODES = [(stage, mode) for stage in range(4) for mode in ("auto", "observe") if stage or mode == "auto"]


def beside(engine: Any, case: Case) -> tuple[Any, DenseOptimizer]:
    """Return a plain copy of the engine's new model, and the dense optimizer at its weights."""
    plain = make_model().to(engine.device)
    start = {name: weight.cpu().double() for name, weight in plain.named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    return plain, reference


def interrupted(rank: int, case: Case) -> dict[str, Any]:
    """Evaluation in the middle of windows, and a forward pass that fails; then a backward pass that fails."""
    engine = build(case, WORLD)
    breaks = [False]
    engine.module.up.register_forward_hook(lambda module, inputs, out: OutOfMemory.apply(out) if breaks[0] else None)
    plain, reference = beside(engine, case)
    for step in range(2):
        tokens = [t.to(engine.device) for t in batches(step, ACCUMULATION * WORLD)]
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        reference.step(chunk_gradients(plain, tokens, 1.0 / ACCUMULATION))
        for index in range(ACCUMULATION):
            engine.backward(engine(tokens[index * WORLD + rank]))
            engine.eval()
            with torch.no_grad():
                engine(tokens[0])
            engine.train()
            engine(tokens[0])  # a loss that is logged, and never differentiated
            engine.step()
    found: dict[str, Any] = {
        "error": relative_error(master_weights(engine), reference),
        "k": ds_vrgd.gsnr_stats(engine).k,
        "raised": [],
    }
    before = master_weights(engine)
    for breaks[0] in (True, False):
        for call in (lambda: engine.backward(engine(tokens[rank])), lambda: engine._take_model_step(None)):
            try:
                call()
            except (MemoryError, RuntimeError) as error:
                found["raised"].append(str(error))
    after = master_weights(engine)
    found["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    return found


def freezing(rank: int, case: Case, *, before_step: bool) -> float:
    """Freeze a layer after a window's first micro-batch, or before its step; return the error of this rank's weights.

    What it has computed stays in the window's mean, as without an engine, and in the other micro-batches it is zero.
    """
    engine = build(case, WORLD)
    (plain, reference), weight = beside(engine, case), engine.module.up.weight
    for step in range(2):
        tokens = [t.to(engine.device) for t in batches(step, ACCUMULATION * WORLD)]
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        chunks = chunk_gradients(plain, tokens, 1.0 if case.unmanaged else 1.0 / ACCUMULATION)
        if case.unmanaged:  # the step is their sum
            chunks = [{name: grad * ACCUMULATION for name, grad in chunk.items()} for chunk in chunks]
        for chunk in chunks[WORLD:] if step and not before_step else ():
            del chunk["up.weight"]
        reference.step(chunks)
        for index in range(ACCUMULATION):
            is_last = index == ACCUMULATION - 1
            engine.backward(engine(tokens[index * WORLD + rank]))
            weight.requires_grad_(not step or is_last != before_step)
            if is_last or not case.unmanaged:
                engine.step()
    with whole_weights(engine) as weights:
        error = relative_error({name: weights[name].cpu().flatten() for name in reference.params}, reference)
    engine.destroy()
    return error


#: By name: a case, and whether the layer is frozen just before the step.
FREEZING = {
    f"{'offload' if zero else reduction} {stage}, {off or 'on'}, {'before the step' if late else 'within'}": (
        Case(
            "VRAdamW", stage, "fp32", ACCUMULATION, reduction=reduction, zero=zero, unmanaged=late,
            arguments={"gamma": 1.0} if off else {},
        ),
        late,
    )
    for off in ("", "off")
    for late in (False, True)
    for stage, reduction, zero in [*((*mode, {}) for mode in MODES), *((stage, "auto", OFFLOAD) for stage in (1, 2, 3))]
}  # fmt: skip


def all_freezings(rank: int) -> dict[str, float]:
    return {name: freezing(rank, case, before_step=late) for name, (case, late) in FREEZING.items()}


@pytest.fixture(scope="module")
def frozen() -> list[dict[str, float]]:
    return run_on_ranks(WORLD, all_freezings)


@pytest.mark.parametrize("name", FREEZING)
def test_a_layer_that_is_frozen_within_a_window_keeps_its_gradients(frozen: list[dict[str, float]], name: str) -> None:
    assert max(of_rank[name] for of_rank in frozen) <= 8e-7


def zeroing(rank: int, optimizer: dict[str, Any], stage: int, by: str) -> dict[str, torch.Tensor]:
    """Return the weights after a window of which the first micro-batch may have been thrown away."""
    case = Case("VRAdamW", stage, "fp32", ACCUMULATION)
    engine = build(case, WORLD, case.config(WORLD) | {"optimizer": optimizer})
    for index, tokens in enumerate(batches(0, ACCUMULATION * WORLD)[rank::WORLD]):
        engine.backward(engine(tokens.to(engine.device)))
        engine.step()
        if index == 0 and by:
            {"engine": engine, "wrapper": engine.optimizer}[by].zero_grad()
    with whole_weights(engine) as weights:
        found = {name: weight.clone() for name, weight in weights.items()}
    engine.destroy()
    return found


def all_zeroings(rank: int) -> dict[tuple[int, str], tuple[bool, bool]]:
    """Return by stage and way whether AdamW's weights are ours at gamma = 1, and whether anything was thrown away."""
    hyper = {"lr": 5e-3, "weight_decay": 0.1}
    ours, theirs = ({"type": "VRAdamW", "params": hyper | {"gamma": 1.0}},
                    {"type": "AdamW", "params": hyper | {"torch_adam": True}})  # fmt: skip
    found = {}
    for stage in range(4):
        kept = zeroing(rank, ours, stage, "")
        for by in ("engine", "wrapper"):
            one, other = (zeroing(rank, optimizer, stage, by) for optimizer in (ours, theirs))
            alike, same = (all(torch.equal(one[name], of[name]) for name in one) for of in (other, kept))
            found[stage, by] = alike, not same
    return found


def test_zero_grad_within_a_window_does_at_gamma_1_what_deepspeed_does_with_adamw() -> None:
    thrown_away = {(0, "engine"), (0, "wrapper"), (1, "engine"), (1, "wrapper"), (3, "wrapper")}
    for found in run_on_ranks(WORLD, all_zeroings):
        assert found == {key: (True, key in thrown_away) for key in found}


def all_modes(rank: int) -> dict[tuple[int, str], dict[str, Any]]:
    return {
        (stage, reduction): interrupted(rank, Case("VRLAMB", stage, "fp32", ACCUMULATION, reduction=reduction))
        for stage, reduction in MODES
    }


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], dict[str, Any]]:
    return run_on_ranks(WORLD, all_modes)[0]


@pytest.mark.parametrize(("stage", "reduction"), MODES)
def test_forward_passes_in_the_middle_change_nothing(
    found: dict[tuple[int, str], dict[str, Any]], stage: int, reduction: str
) -> None:
    assert found[stage, reduction]["error"] <= 8e-7
    assert found[stage, reduction]["k"] == WORLD * ACCUMULATION


@pytest.mark.parametrize(("stage", "reduction"), MODES)
def test_no_step_after_a_backward_pass_that_broke_off(
    found: dict[tuple[int, str], dict[str, Any]], stage: int, reduction: str
) -> None:
    broken, *refused = found[stage, reduction]["raised"]
    assert broken == "out of memory"
    assert len(refused) == 3
    for message in refused:
        assert "broke off" in message
        assert "Start again from the last checkpoint" in message
    assert found[stage, reduction]["unchanged"]
