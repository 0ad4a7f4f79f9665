"""The rules on the CPU through ``torch.compile``: what the piecewise passes are compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.moments import ShardLayout
from ds_vrgd.optim import adam as rule
from ds_vrgd.optim.lamb import lamb_step, lamb_update

K, EPS, GAMMA, BETA3, LR, STEP = 8.0, 1e-6, 0.1, 0.9, 1e-4, 10
GROUP: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01}


def _gradient(total: Tensor, m2: Tensor, average: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = gsnr.normalized_ratio(gsnr.raw_ratio(total, m2, K, EPS), mean)
    low, high = (ratio < GAMMA).sum(dtype=torch.float32), (ratio > 1.0).sum(dtype=torch.float32)
    p = gsnr.advance_average(average, gsnr.clamped_ratio(ratio, GAMMA), BETA3, STEP, 0, False)
    return p * total / (1.0 - BETA3**STEP), low, high


def _sums(total: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return gsnr.ratio_sums(total, m2, K, EPS)


def _adam(
    weights: Tensor, total: Tensor, m2: Tensor, average: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    gradient, low, high = _gradient(total, m2, average, mean)
    rule.adam(weights, gradient, exp_avg, exp_avg_sq, STEP, lr=LR, decoupled=True, **GROUP)
    return low, high


def _advance(
    weights: Tensor, total: Tensor, m2: Tensor, average: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, mean: Tensor
) -> tuple[Tensor, ...]:
    gradient, low, high = _gradient(total, m2, average, mean)
    update = lamb_update(weights, gradient, exp_avg, exp_avg_sq, STEP, GROUP)
    return (weights * weights).sum(), (update * update).sum(), low, high


def _apply(weights: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rate: Tensor) -> None:
    lamb_step(weights, exp_avg, exp_avg_sq, STEP, rate, GROUP)


def _never(*tensors: Tensor) -> bool:
    return False


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _run(update: Callable[[], None]) -> Callable[[], None]:
    """Return the update with the formulas of Adam, which the compiler sees, in place of torch's own kernel."""

    @torch.no_grad()
    def run() -> None:
        with mock.patch.object(rule, "in_one_pass", _never):
            update()

    return run


def _tensors(layout: ShardLayout) -> list[list[Tensor]]:
    """Return weights, total, m2, average and both moments, layer by layer."""
    whole = [torch.rand(layout.numel) for _ in range(6)]
    return [[tensor[s.start : s.start + s.numel] for tensor in whole] for s in layout.segments]


def adam(layout: ShardLayout) -> Callable[[], None]:
    """Return VR-AdamW in two compiled calls for each layer."""
    layers, sums, step = _tensors(layout), _compiled(_sums), _compiled(_adam)

    def update() -> None:
        means = [sums(layer[1], layer[2])[0] / layer[0].numel() for layer in layers]
        for layer, mean in zip(layers, means, strict=True):
            step(*layer, mean)

    return _run(update)


def lamb(layout: ShardLayout) -> Callable[[], None]:
    """Return VR-LAMB in three compiled calls for each layer."""
    layers, sums, advance, apply = _tensors(layout), _compiled(_sums), _compiled(_advance), _compiled(_apply)

    def update() -> None:
        means = [sums(layer[1], layer[2])[0] / layer[0].numel() for layer in layers]
        norms = [advance(*layer, mean) for layer, mean in zip(layers, means, strict=True)]
        for layer, (weight, change, *_) in zip(layers, norms, strict=True):
            apply(layer[0], layer[4], layer[5], LR * (weight / change).sqrt())

    return _run(update)
