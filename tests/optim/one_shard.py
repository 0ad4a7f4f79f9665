"""A shard as ZeRO hands it out: unaligned layers, NaN in the padding, a layer of other ranks alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.moments import Layer, Moments, Ranks, Segment, ShardLayout
from ds_vrgd.moments.chan import moments_of
from ds_vrgd.optim import OPTIMIZERS, Observer
from ds_vrgd.optim.observer import Shard

NUMELS = {"one": 1, "odd": 2047, "large": 4101, "still": 70, "elsewhere": 10}
STARTS = {"one": 3, "odd": 4, "large": 2056, "still": 6157}
NUMEL = 6240
LAYOUT = ShardLayout(
    tuple(Layer(name, numel) for name, numel in NUMELS.items()),
    tuple(Segment(list(NUMELS).index(name), start, NUMELS[name]) for name, start in STARTS.items()),
    NUMEL,
)
SCALE = 0.37


def run_of(name: str) -> slice:
    return slice(STARTS[name], STARTS[name] + NUMELS[name])


def padded(values: Tensor) -> Tensor:
    """``values`` with NaN wherever no layer is."""
    out = torch.full_like(values, torch.nan)
    for name in STARTS:
        out[..., run_of(name)] = values[..., run_of(name)]
    return out


class OneShard(Observer):
    """An observer of one shard whose moments it is given."""

    ranks = Ranks()

    def __init__(self, parts: int, apart: bool) -> None:
        self.window, self.k, self.bad = 0, 0, False
        self._parts, self._apart = parts, apart

    def receive(self, tensor: Tensor, chunks: Tensor) -> None:
        mean, m2 = moments_of(chunks)
        self._moments = Moments(padded(mean * self._parts).to(tensor.device), padded(m2).to(tensor.device), self._parts)
        self._gradient = self._moments.total.clone() if self._apart else self._moments.total
        tensor.grad = self._gradient
        self.k = len(chunks)

    def layout(self, tensor: Tensor) -> ShardLayout:
        return LAYOUT

    def agree(self, spec: object) -> None:
        pass

    def finish(self) -> int:
        return self.k

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        return self.bad

    def skip_step(self, on_bad_gradient: Any) -> None:
        self.after_step()

    def moments(self, tensor: Tensor) -> Moments:
        return self._moments

    def gradient(self, shard: Shard, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        return self._gradient, torch.tensor(SCALE, device=shard.grad.device)

    def unit(self, k: int) -> float:
        return 1.0

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        whole = torch.cat([self._gradient[run_of(name)] for name in STARTS])
        return whole.double().norm() * SCALE

    def after_step(self) -> None:
        self.window += 1


def chunks_of(step: int, k: int) -> Tensor:
    chunks = 0.3 + torch.randn(k, NUMEL, generator=torch.Generator().manual_seed(step))
    chunks[:, run_of("still")] = 0  # a layer without gradient
    chunks[:, 100:200] = 0
    return chunks


def trained(
    name: str, k: int, parts: int, apart: bool, device: torch.device, **arguments: Any
) -> tuple[Tensor, DenseOptimizer, Any]:
    """The shard's weights after three steps, the reference after the same, and the optimizer."""
    start = padded(torch.randn(NUMEL, generator=torch.Generator().manual_seed(99)))
    weights = torch.nn.Parameter(start.to(device))
    arguments = {"lr": 0.05, "weight_decay": 0.02, **arguments}
    optimizer = OPTIMIZERS[name]([weights], **arguments)
    observer = OneShard(parts, apart)
    optimizer.observe(observer)
    reference = DenseOptimizer(name, {layer: start[run_of(layer)] for layer in STARTS}, **arguments)
    for step in range(3):
        chunks = chunks_of(step, k)
        observer.receive(weights, chunks)
        before = observer._gradient.clone()
        optimizer.step()
        assert torch.equal(observer._gradient.nan_to_num(7.0), before.nan_to_num(7.0)), "the gradient was changed"
        cut = [{layer: chunk[run_of(layer)] for layer in STARTS} for chunk in chunks]
        mean = {layer: chunks.double().mean(0)[run_of(layer)] * (parts * SCALE) for layer in STARTS}
        reference.step(cut, mean=mean)
    return weights.detach().cpu(), reference, optimizer


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("VRMomentum", {"nesterov": True, "weight_decay": 0}),
    ("VRLARS", {"nesterov": True, "trust_clip": (0.0005, 0.002)}),
    ("VRLARS", {"adapt": False, "momentum": 0.0}),
    ("VRLAMB", {"bias_correction": False, "trust_clip": (0.5, 2.0)}),
    ("VRLAMB", {"adapt": False, "prenormalize": True}),
    ("LAMB", {"prenormalize": True}),
    ("VRAdam", {"gsnr_dtype": "bfloat16"}),
]
