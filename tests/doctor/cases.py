"""A user's own models, as ``--model`` finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Regression(nn.Module):
    """A model that takes keyword arguments, drops out, and returns an object with ``.loss``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.3), nn.Linear(7, 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        return SimpleNamespace(loss=(self.layers(inputs).squeeze(-1) - targets).square().mean())


def make_regression() -> tuple[nn.Module, Any]:
    def batches(step: int, index: int) -> dict[str, Tensor]:
        inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * step + index))
        return {"inputs": inputs, "targets": inputs.sum(1)}

    return Regression(), batches


def make_nothing() -> None:
    """Return no model."""
