"""fp16's loss scale: a step that is skipped leaves nothing behind, and one at which the scale grows is right."""

from __future__ import annotations

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
OVERFLOWING = 2


def train(rank: int, stage: int, overflows: bool, window: int) -> dict[str, Any]:
    """Six steps; in one of them, if asked, a single micro-batch of rank 1 overflows."""
    case = Case("VRLAMB", stage, "fp16", ACCUMULATION)
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
        spoiled = overflows and step == OVERFLOWING
        if not spoiled:
            reference.step(chunk_gradients(plain, micro_batches, scale / ACCUMULATION))
        for index in range(ACCUMULATION):
            loss = engine(micro_batches[index * WORLD + rank])
            engine.backward(loss * 1e9 if spoiled and rank == 1 and index == 1 else loss)
            engine.step()
    masters = master_weights(engine)
    answer = {"error": relative_error(masters, reference), "skipped": engine.skipped_steps, "scales": scales}
    engine.destroy()
    return answer


def train_all(rank: int) -> dict[tuple[int, str], dict[str, Any]]:
    return {
        (stage, kind): train(rank, stage, kind == "overflow", 1000 if kind == "overflow" else 2)
        for stage in (1, 2, 3)
        for kind in ("overflow", "growth")
    }


@pytest.fixture(scope="module")
def runs() -> dict[tuple[int, str], dict[str, Any]]:
    answers = run_on_ranks(WORLD, train_all)
    assert torch.equal(*(torch.tensor([run["error"] for run in answer.values()]) for answer in answers))
    return answers[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overflow_on_one_rank_skips_the_step_and_its_chunks(
    runs: dict[tuple[int, str], dict[str, Any]], stage: int
) -> None:
    run = runs[stage, "overflow"]
    assert run["skipped"] == 1
    assert run["scales"] == [256.0] * 3 + [128.0] * 3  # halved once, after the third step
    assert run["error"] <= 8e-7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_step_at_which_the_loss_scale_grows_takes_the_whole_gradient(
    runs: dict[tuple[int, str], dict[str, Any]], stage: int
) -> None:
    run = runs[stage, "growth"]
    assert run["skipped"] == 0
    assert run["scales"][-1] > run["scales"][0]
    assert run["error"] <= 8e-7
