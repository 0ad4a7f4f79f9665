"""Gradients at the edge of fp32, given as they are: too small to be squared, and chunks that cancel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from ds_vrgd.doctor.reference import DenseOptimizer, raw_ratio
from ds_vrgd.doctor.weights import master_weights
from ds_vrgd.noise import gsnr_stats
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import DTYPES, relative_error

pytestmark = pytest.mark.slow

WORLD, STEPS, ROWS, COLUMNS = 2, 5, 12, 7
OF_WEIGHTS = 8e-7


@dataclass(frozen=True)
class Hard:
    """An engine, and gradients that are hard on it.

    Attributes:
        kind: "cancelling", or the size of the gradients of every second row and of a whole layer.
        accumulation: micro-batches, a power of two, so that dividing the loss by it rounds nothing.
    """

    optimizer: str
    stage: int
    kind: str | float
    dtype: str = "fp32"
    reduction: str = "auto"
    accumulation: int = 4

    def __str__(self) -> str:
        return f"{self.optimizer}-z{self.stage}-{self.dtype}-{self.reduction}-{self.kind}"

    def arguments(self) -> dict[str, Any]:
        rate = {"VRSGD": 0.05, "VRMomentum": 0.05, "VRLARS": 1.0, "LARS": 1.0}.get(self.optimizer, 5e-3)
        return {"lr": rate, "eps": 0.0} if "LARS" in self.optimizer else {"lr": rate}


def cases() -> Iterator[Hard]:
    for stage in (0, 1, 2, 3):
        for size in (1e-18, 1e-20, 1e-25):
            yield Hard("VRSGD", stage, size)
        yield Hard("VRLARS", stage, 1e-20)
        yield Hard("LARS", stage, 1e-25)
        yield Hard("VRAdamW", stage, "cancelling", "bf16", accumulation=8)
        yield Hard("VRLAMB", stage, "cancelling", "fp32" if stage == 2 else "bf16", accumulation=8)
    yield Hard("VRLARS", 2, 1e-25, reduction="observe")
    yield Hard("VRMomentum", 3, 1e-20, "bf16", reduction="observe")


class Given(nn.Module):
    """Parameters whose gradient is the batch."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.mixed = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
        self.small = nn.Parameter(torch.randn(ROWS, generator=generator))

    def forward(self, mixed: Tensor, small: Tensor) -> Tensor:
        return (self.mixed * mixed).sum() + (self.small * small).sum()


def gradients(case: Hard, step: int) -> list[dict[str, Tensor]]:
    """Return the gradients of all micro-batches, those of a rank in a row, in the model's dtype."""
    generator = torch.Generator().manual_seed(step)
    count = WORLD * case.accumulation
    mixed = 0.5 + torch.randn(count, ROWS, COLUMNS, generator=generator)
    small = 0.5 + torch.randn(count, ROWS, generator=generator)
    if isinstance(case.kind, float):
        mixed[:, ::2] *= case.kind
        small *= case.kind
    else:  # each rank's chunks cancel, in the second half of the rows to the last bit
        for of in (mixed, small):
            of[1::2] = -of[::2]
            of[-1, : ROWS // 2] *= 1 + 2**-6
    return [
        {"mixed": m.to(DTYPES[case.dtype]), "small": s.to(DTYPES[case.dtype])}
        for m, s in zip(mixed, small, strict=True)
    ]


def follow(rank: int, case: Hard) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return the error of the weights, and the layers' mean raw ratio at the last step with its right value."""
    model = Given()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": case.optimizer, "params": case.arguments()},
        "bf16": {"enabled": case.dtype == "bf16"},
        "steps_per_print": 10**9,
    }
    if case.optimizer.startswith("VR"):
        config["optimizer"]["params"]["reduction"] = case.reduction  # type: ignore[index]
    start = {name: param.detach().to(DTYPES[case.dtype]).double() for name, param in model.named_parameters()}
    reference = DenseOptimizer(case.optimizer, start, **case.arguments())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    measured: dict[str, float] = {}
    for step in range(STEPS):
        chunks = gradients(case, step)
        for index in range(case.accumulation):
            engine.backward(
                engine(**{n: g.to(engine.device) for n, g in chunks[rank * case.accumulation + index].items()})
            )
            engine.step()
        # Autograd's gradients are those of the loss over the number of micro-batches.
        seen = [{name: grad.double() / case.accumulation for name, grad in chunk.items()} for chunk in chunks]
        mean = {name: torch.stack([chunk[name].double() for chunk in chunks]).mean(0) for name in start}
        reference.step(seen, mean=mean)
    assert engine.skipped_steps == 0
    if case.optimizer.startswith("VR"):
        measured = {name: layer.mean_ratio for name, layer in gsnr_stats(engine).layers.items()}
    right = {name: float(raw_ratio([chunk[name] for chunk in seen], 1e-6).mean()) for name in measured}
    error = relative_error(master_weights(engine), reference)
    engine.destroy()
    return error, measured, right


def run_all(rank: int) -> dict[str, Any]:
    return {str(case): follow(rank, case) for case in cases()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, run_all)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_follows_the_reference(found: list[dict[str, Any]], case: Hard) -> None:
    error, measured, right = found[0][str(case)]
    assert error <= OF_WEIGHTS
    assert measured == pytest.approx(right, rel=1e-5)
