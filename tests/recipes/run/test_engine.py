"""Batch sizes that change between steps."""

from __future__ import annotations

from typing import Any

from ds_vrgd_recipes.run.engine import set_batch_sizes
from tests.support.model import batches
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, build

CASES = (
    Case("VRLAMB", 0, "fp32", 2),
    Case("VRLAMB", 1, "bf16", 2, "fp32"),
    Case("VRLAMB", 2, "fp32", 2),
    Case("VRLAMB", 2, "fp32", 2, zero={"offload_optimizer": {"device": "cpu"}}),
    Case("VRLAMB", 3, "fp32", 2),
    Case("VRLAMB", 3, "fp32", 2, zero={"offload_optimizer": {"device": "cpu"}}),
)


def train_with_changing_batches(rank: int) -> list[dict[str, Any]]:
    """Two steps of 2 micro-batches of 4, then two of 3 of 2, on one rank."""
    answers = []
    for case in CASES:
        engine = build(case, 1)
        steps = []
        for step, (micro_batch, accumulation) in enumerate([(4, 2), (4, 2), (2, 3), (2, 3)]):
            set_batch_sizes(engine, micro_batch, micro_batch * accumulation)
            for index, tokens in enumerate(batches(step, accumulation, micro_batch)):
                engine.set_gradient_accumulation_boundary(index == accumulation - 1)
                engine.backward(engine(tokens.to(engine.device)))
                engine.step()
            steps.append((engine.global_steps, engine.gradient_accumulation_steps()))
        wrapper = getattr(engine.optimizer, "gradient_accumulation_steps", 3)
        answers.append({"steps": steps, "wrapper": wrapper, "sizes": engine.train_micro_batch_size_per_gpu()})
        engine.destroy()
    return answers


def test_batch_sizes_change_between_steps_at_every_stage() -> None:
    for case, answer in zip(CASES, run_on_ranks(1, train_with_changing_batches)[0], strict=True):
        assert answer["steps"] == [(1, 2), (2, 2), (3, 3), (4, 3)], case
        assert answer["wrapper"] == 3, f"{case}: the ZeRO wrapper kept its accumulation"
        assert answer["sizes"] == 2
