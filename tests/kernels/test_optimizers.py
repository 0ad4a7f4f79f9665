"""Whole steps through the kernels, beside the dense float64 reference and the eager path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd import kernels
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS
from tests.kernels.conftest import COMPILED
from tests.optim.training import BOUND, Training

pytestmark = [
    pytest.mark.skipif(COMPILED, reason="tests/engines/deepspeed runs the optimizers on the GPU"),
    pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only"),
]

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("VRMomentum", {"nesterov": False}),
    ("VRLARS", {"nesterov": True, "trust_clip": (0.5, 2.0)}),
    ("VRLAMB", {"bias_correction": False}),
    ("VRLAMB", {"trust_clip": (0.5, 2.0), "prenormalize": True}),
    ("VRLAMB", {"gamma": 0.5, "beta3": 0.5, "gsnr_eps": 1e-3}),
    ("LAMB", {"prenormalize": True}),
    ("VRAdamW", {"gamma": 1.0}),
]
each = pytest.mark.parametrize(
    ("name", "arguments"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "_".join(value)
)


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def usable(*tensors: Tensor) -> bool:
        return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)

    monkeypatch.setattr(kernels, "usable", usable)


def weights_after(name: str, steps: int, **arguments: Any) -> tuple[list[Tensor], Training]:
    training = Training(name, **arguments)
    for step in range(steps):
        training.step(step, clip=0.05)
    return [weight.detach() for weight in training.model.parameters()], training


@each
def test_follows_the_reference(monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]) -> None:
    through_kernels(monkeypatch)
    weights, training = weights_after(name, 3, **arguments)
    assert training.moved() > 1e-3
    assert training.error() <= BOUND
    again, _ = weights_after(name, 3, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(weights, again, strict=True)), "two runs differ"


@pytest.mark.filterwarnings("ignore:.*this window has one chunk")
@pytest.mark.parametrize(("name", "arguments"), [*((n, {}) for n in OPTIMIZERS), ("VRLAMB", {"prenormalize": True})])
def test_windows_of_one_chunk(monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]) -> None:
    through_kernels(monkeypatch)
    training = Training(name, **arguments)
    for step, training.accumulation in enumerate((1, 4, 1, 4)):
        training.step(step, clip=0.05)
    assert training.moved() > 1e-3
    assert training.error() <= BOUND


def test_a_window_of_one_chunk_takes_an_average_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kernel in (False, True):
        if kernel:
            through_kernels(monkeypatch)
        training = Training("VRLAMB", gsnr_dtype="bfloat16")
        for step, training.accumulation in enumerate((4, 1)):
            training.step(step)
        found.append(torch.cat([state["exp_avg"].flatten() for state in training.optimizer.state.values()]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-3  # a bf16 average has 8 bits


@pytest.mark.parametrize("name", ["VRLAMB", "VRAdamW", "VRLARS", "VRSGD"])
def test_statistics_are_those_of_the_eager_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _, eager = weights_after(name, 1)
    through_kernels(monkeypatch)
    _, triton = weights_after(name, 1)
    for one, other in zip(eager.optimizer.layer_statistics, triton.optimizer.layer_statistics, strict=True):
        assert one.table.names == other.table.names
        for column in ("mean_ratio", "square", "variance"):
            torch.testing.assert_close(getattr(one, column), getattr(other, column), rtol=1e-5, atol=1e-12)
        for column in ("clamped_low", "clamped_high"):
            torch.testing.assert_close(getattr(one, column), getattr(other, column), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["VRLAMB", "VRAdam"])
def test_an_average_in_bf16_has_the_bits_of_the_eager_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _, eager = weights_after(name, 2, gsnr_dtype="bfloat16")
    through_kernels(monkeypatch)
    _, triton = weights_after(name, 2, gsnr_dtype="bfloat16")
    pairs = list(zip(eager.optimizer.state.values(), triton.optimizer.state.values(), strict=True))
    same = torch.cat([(a["exp_avg_gsnr"] == b["exp_avg_gsnr"]).flatten() for a, b in pairs])
    assert all(b["exp_avg_gsnr"].dtype == torch.bfloat16 for _, b in pairs)
    # The fp32 average differs in its last bit here and there, and then the rounding may.
    assert same.float().mean() > 0.999


class Two(torch.nn.Module):
    """Two layers, of which a param group each."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def backward(self, seed: int) -> dict[str, Tensor]:
        """Accumulate an eighth of a chunk's gradients; returns them whole."""
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        loss = self.b(torch.tanh(self.a(inputs))).square().mean()
        names, params = zip(*self.named_parameters(), strict=True)
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        (loss / 8).backward()
        return dict(zip(names, grads, strict=True))


@pytest.mark.parametrize("name", ["VRSGD", "VRAdam", "VRLARS", "VRLAMB"])
def test_gsnr_in_one_group_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # what is of the whole model (the norm of pre-normalisation) is not of one group
    through_kernels(monkeypatch)
    model, arguments = Two(), {"lr": 0.1, "weight_decay": 0.01}
    if name == "VRLAMB":
        arguments |= {"prenormalize": True, "eps": 0.01}
    optimizer = OPTIMIZERS[name](
        [{"params": model.a.parameters()}, {"params": model.b.parameters(), "gamma": 1.0}], **arguments
    )
    groups = [{"params": ["a.weight", "a.bias"]}, {"params": ["b.weight", "b.bias"], "gamma": 1.0}]
    reference = DenseOptimizer(name, dict(model.named_parameters()), groups, **arguments)
    for step in range(3):
        chunks = [model.backward(8 * step + index) for index in range(8)]
        optimizer.step()
        optimizer.zero_grad()
        reference.step(chunks)
    for weight_name, weight in model.named_parameters():
        torch.testing.assert_close(weight.detach().double(), reference.params[weight_name], rtol=1e-5, atol=1e-6)


def test_an_average_that_begins_late(monkeypatch: pytest.MonkeyPatch) -> None:
    # a checkpoint of the base optimizer brings the step, but no average
    results = []
    for kernel in (False, True):
        if kernel:
            through_kernels(monkeypatch)
        model = Two()
        base = OPTIMIZERS["VRLAMB"](model.parameters(), lr=0.01, gamma=1.0)
        optimizer = OPTIMIZERS["VRLAMB"](model.parameters(), lr=0.01)
        for index in range(8):
            model.backward(index)
        base.step()
        with pytest.warns(UserWarning, match="begins anew"):
            optimizer.load_state_dict(base.state_dict())
        for step in range(1, 3):
            optimizer.zero_grad()
            for index in range(8):
                model.backward(8 * step + index)
            optimizer.step()
        results.append([state["exp_avg_gsnr"] for state in optimizer.state.values()])
    for eager, triton in zip(*results, strict=True):
        torch.testing.assert_close(eager, triton, rtol=1e-4, atol=1e-5)
