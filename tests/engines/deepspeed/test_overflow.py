"""The loss scale of fp16: a skipped step leaves nothing behind, and a step at which the scale grows is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import (
    Case,
    build,
    reference_groups,
    relative_error,
)

WORLD, ACCUMULATION, STEPS = 2, 4, 6
#: Which micro-batch of rank 1 alone overflows, by step: in the very first window, and in two windows in a row.
OVERFLOWS = {0: 1, 2: 3, 3: 0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
#: (stage, reduction, further keys of zero_optimization)
ENGINES: dict[str, tuple[int, str, dict[str, Any]]] = {
    f"stage {stage}, {name}": (stage, reduction, zero)
    for stage in (1, 2, 3)
    for name, reduction, zero in (
        ("fused", "fused", {}),
        ("observe", "observe", {}),
        ("offload", "auto", OFFLOAD),
    )
}


def train(rank: int, case: Case, overflows: dict[int, int], window: int) -> dict[str, Any]:
    """Take some steps; in some of them a single micro-batch of rank 1 overflows."""
    config = case.config(WORLD)
    config["fp16"] |= {"loss_scale_window": window, "hysteresis": 1}
    engine = build(case, WORLD, config)
    plain = make_model().to(engine.device, torch.float16)
    start = {name: weight.cpu().double() for name, weight in plain.named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    scales = []
    for step in range(STEPS):
        micro_batches = [tokens.to(engine.device) for tokens in batches(step, ACCUMULATION * WORLD)]
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        scale = float(engine.optimizer.loss_scale)
        scales.append(scale)
        if step not in overflows:
            reference.step(chunk_gradients(plain, micro_batches, scale / ACCUMULATION))
        for index in range(ACCUMULATION):
            loss = engine(micro_batches[index * WORLD + rank])
            engine.backward(loss * 1e9 if rank == 1 and overflows.get(step) == index else loss)
            engine.step()
    masters = master_weights(engine)
    answer = {
        "error": relative_error(masters, reference),
        "skipped": engine.skipped_steps,
        "scales": scales,
        "counts": sorted({float(state["step"]) for state in engine.basic_optimizer.state.values()}),
    }
    engine.destroy()
    return answer


def train_all(rank: int) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for name, (stage, reduction, zero) in ENGINES.items():
        # An overflow is the loss scale's business: nonfinite="error" must not see it.
        case = Case("VRLAMB", stage, "fp16", ACCUMULATION, reduction=reduction, zero=zero)
        strict = replace(case, nonfinite="error")
        found[name, "overflow"] = train(rank, strict, OVERFLOWS, 1000)
        if reduction == "fused":
            found[name, "growth"] = train(rank, case, {}, 2)
    return found


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], dict[str, Any]]:
    answers = run_on_ranks(WORLD, train_all)
    assert torch.equal(*(torch.tensor([run["error"] for run in answer.values()]) for answer in answers))
    return answers[0]


@pytest.mark.parametrize("name", ENGINES)
def test_overflow_on_one_rank_skips_the_step_and_its_chunks(
    runs: dict[tuple[str, str], dict[str, Any]], name: str
) -> None:
    run = runs[name, "overflow"]
    assert run["skipped"] == len(OVERFLOWS)
    assert run["scales"] == [256.0, 128.0, 128.0, 64.0, 32.0, 32.0]  # halved behind each
    assert run["counts"] == [STEPS - len(OVERFLOWS)]
    assert run["error"] <= 8e-7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_step_at_which_the_loss_scale_grows_takes_the_whole_gradient(
    runs: dict[tuple[str, str], dict[str, Any]], stage: int
) -> None:
    run = runs[f"stage {stage}, fused", "growth"]
    assert run["skipped"] == 0
    assert run["scales"][-1] > run["scales"][0]
    assert run["error"] <= 8e-7
