"""The update on the CPU as ``torch.compile`` would have it: what :mod:`ds_vrgd.kernels.on_cpu` is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import ShardLayout

K, EPS, GAMMA, BETA3, DECAY, LR = 8.0, 1e-6, 0.1, 0.9, 0.01, 1e-4


def _raw(total: Tensor, m2: Tensor) -> Tensor:
    square = total * total
    variance = torch.maximum(m2 / K, square * EPS)
    return square / torch.where(variance == 0, 1.0, variance)


def _sums(total: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _raw(total, m2).sum(), (total * total).sum(), m2.sum()


def _gradient(total: Tensor, m2: Tensor, average: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = _raw(total, m2) / mean
    low, high = (ratio < GAMMA).sum(dtype=torch.float32), (ratio > 1.0).sum(dtype=torch.float32)
    advanced = average * BETA3 + torch.clamp(ratio, GAMMA, 1.0) * (1.0 - BETA3)
    average.copy_(advanced)
    return advanced * total, low, high


def _direction(gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    mean = exp_avg + 0.1 * (gradient - exp_avg)
    square = exp_avg_sq * 0.999 + 0.001 * gradient * gradient
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    return mean / (square.sqrt() + 1e-6)


def _adam(
    weights: Tensor, total: Tensor, m2: Tensor, average: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    gradient, low, high = _gradient(total, m2, average, mean)
    weights.copy_(weights * (1.0 - LR * DECAY) - LR * _direction(gradient, exp_avg, exp_avg_sq))
    return low, high


def _advance(
    weights: Tensor, total: Tensor, m2: Tensor, average: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, mean: Tensor
) -> tuple[Tensor, ...]:
    gradient, low, high = _gradient(total, m2, average, mean)
    update = _direction(gradient, exp_avg, exp_avg_sq) + DECAY * weights
    return (weights * weights).sum(), (update * update).sum(), low, high


def _apply(weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rate: Tensor) -> None:
    weights.sub_(rate * (exp_avg / (exp_avg_sq.sqrt() + 1e-6) + DECAY * weights))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _tensors(layout: ShardLayout) -> list[list[Tensor]]:
    """Weights, total, m2, average and both moments, layer by layer."""
    whole = [torch.rand(layout.numel) for _ in range(6)]
    return [[tensor[s.start : s.start + s.numel] for tensor in whole] for s in layout.segments]


def adam(layout: ShardLayout) -> Callable[[], Any]:
    """VR-AdamW in two compiled calls a layer."""
    layers, sums, step = _tensors(layout), _compiled(_sums), _compiled(_adam)

    def run() -> None:
        means = [sums(layer[1], layer[2])[0] / layer[0].numel() for layer in layers]
        for layer, mean in zip(layers, means, strict=True):
            step(*layer, mean)

    return torch.no_grad()(run)


def lamb(layout: ShardLayout) -> Callable[[], Any]:
    """VR-LAMB in three compiled calls a layer."""
    layers, sums, advance, apply = _tensors(layout), _compiled(_sums), _compiled(_advance), _compiled(_apply)

    def run() -> None:
        means = [sums(layer[1], layer[2])[0] / layer[0].numel() for layer in layers]
        norms = [advance(*layer, mean) for layer, mean in zip(layers, means, strict=True)]
        for layer, (weight, update, *_) in zip(layers, norms, strict=True):
            apply(layer[0], layer[4], layer[5], LR * (weight / update).sqrt())

    return torch.no_grad()(run)
