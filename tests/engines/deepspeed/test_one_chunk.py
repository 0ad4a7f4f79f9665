"""Windows of one chunk among others, as a Trainer makes at the end of an epoch, at every stage and in both modes."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.engines.deepspeed import to_universal
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import (
    DTYPES,
    Case,
    build,
    chunk_gradients,
    master_weights,
    reference_groups,
    relative_error,
    whole_weights,
)

pytestmark = pytest.mark.slow

ACCUMULATION = 4
WINDOWS = (4, 1, 4, 1, 4)
MODES = [(stage, mode) for stage in range(4) for mode in ("auto", "observe") if stage or mode == "auto"]
CASES = {
    **{f"VRLAMB, stage {s}, {m}": Case("VRLAMB", s, "fp32", ACCUMULATION, reduction=m) for s, m in MODES},
    **{f"VRLARS, stage {s}": Case("VRLARS", s, "fp32", ACCUMULATION) for s in (0, 2)},
    "VRAdamW, stage 3, bf16": Case("VRAdamW", 3, "bf16", ACCUMULATION),
    "VRAdam, stage 1, fp32 sums": Case("VRAdam", 1, "bf16", ACCUMULATION, accum_dtype="fp32"),
    "VRSGD, stage 2, offload": Case("VRSGD", 2, "fp32", ACCUMULATION, zero={"offload_optimizer": {"device": "cpu"}}),
}


def train(engine: Any, steps: range, follow: Any = None) -> None:
    """Train over windows that end where the program says, as Accelerate does."""
    for step in steps:
        micro_batches = [tokens.to(engine.device) for tokens in batches(step, WINDOWS[step])]
        if follow is not None:
            follow(micro_batches)
        for index, tokens in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(index == len(micro_batches) - 1)
            engine.backward(engine(tokens))
            engine.step()


def one(case: Case) -> dict[str, Any]:
    """Follow the reference; then resume in a new engine before and after each short window, once by a conversion."""
    engine = build(case, 1)
    plain = make_model().to(engine.device, DTYPES[case.dtype])
    start = {name: weight.cpu().double() for name, weight in plain.named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())

    def follow(micro_batches: list[torch.Tensor]) -> None:
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        scale = len(micro_batches) / ACCUMULATION  # DeepSpeed sums what it has divided by the full window's number
        chunks = chunk_gradients(plain, micro_batches, 1.0 / ACCUMULATION)
        reference.step([{name: grad * scale for name, grad in chunk.items()} for chunk in chunks])

    train(engine, range(len(WINDOWS)), follow)
    after = master_weights(engine)
    found = {"error": relative_error(after, reference), "mode": engine.basic_optimizer.observer.mode}
    engine.destroy()
    with tempfile.TemporaryDirectory() as folder:
        for first, last in ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)):
            converts = case.stage in (1, 2) and first == 2
            engine = build(case, 1, case.config(1) | {"checkpoint": {"load_universal": converts}})
            if converts:
                to_universal(folder, f"{folder}/universal")
            if first:
                engine.load_checkpoint(f"{folder}/universal" if converts else folder)
            train(engine, range(first, last))
            engine.save_checkpoint(folder)
            resumed = master_weights(engine)
            engine.destroy()
    return found | {"bitwise": all(torch.equal(after[name], resumed[name]) for name in after)}


def all_cases(rank: int) -> dict[str, Any]:
    return {name: one(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_ranks(1, all_cases)[0]


@pytest.mark.parametrize("name", CASES)
def test_windows_of_one_chunk_follow_the_reference_and_resume_bitwise(found: dict[str, Any], name: str) -> None:
    case = CASES[name]
    assert found[name]["mode"] == ("fused" if case.is_fused() else "observe")
    assert found[name]["error"] <= 8e-7
    assert found[name]["bitwise"]
