"""A training of a small perceptron in which one rank has a fault, under any engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

#: Steps without a fault, and the most with one.
BEFORE, AFTER = 30, 45
FAULTY, TWIN = 2, 0
LAYER = "up.weight"

#: What the watch calls a fault, the layers that it is in, and how many steps it may take. Where several names are
#: right, a fault of all layers may be told by the one that stands out first.
FAULTS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "none": ("", (), 0),
    "same batch": ("identical", (), 1),
    "repeated batch": ("repeated drifted", (), AFTER),
    "shuffled labels": ("wrong scaled", (), AFTER),
    "half": ("scaled", (), AFTER),
    "half in a layer": ("scaled", (LAYER,), AFTER),
    "double in a layer": ("scaled", (LAYER,), AFTER),
    "zero in a layer": ("zero", (LAYER,), 1),
    "flipped in a layer": ("flipped", (LAYER,), AFTER),
    "exponent bit 7": ("nonfinite", (LAYER,), 1),
    "NaN": ("nonfinite", (LAYER,), 1),
}


class _Edited(torch.autograd.Function):
    """The identity, whose gradient somebody edits."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, edit: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.edit = edit
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.edit(grad), None


class FaultyLinear(nn.Linear):
    """A layer whose weight's gradient can be edited before any reduction."""

    edit: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.edit is None else _Edited.apply(self.weight, self.edit)
        return nn.functional.linear(x, weight, self.bias)


class Perceptron(nn.Module):
    """Two layers before the last one; its loss is the cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Linear(24, 32), FaultyLinear(32, 48), nn.Linear(48, 6)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(torch.tanh(self.first(inputs))))
        return nn.functional.cross_entropy(self.last(hidden).float(), classes)


def perceptron() -> Perceptron:
    """Return the model, with the same weights on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Perceptron()


class Data:
    """Batches of a linear teacher, and the faults of one rank's."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.rank = fault, rank
        self._generator = torch.Generator().manual_seed(11)
        self._teacher = torch.randn(24, 6, generator=self._generator)
        self._kept: tuple[Tensor, Tensor] | None = None

    def batch(self, step: int, ranks: int) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and classes; every rank draws those of all."""
        inputs = torch.randn(ranks, 16, 24, generator=self._generator)
        noise = torch.randn(ranks, 16, 6, generator=self._generator)
        classes = (inputs @ self._teacher + noise).argmax(-1)
        place = self.rank
        if step >= BEFORE and self.rank == FAULTY:
            if self.fault == "same batch":
                place = TWIN
            elif self.fault == "repeated batch":
                self._kept = self._kept or (inputs[place], classes[place])
                return self._kept
            elif self.fault == "shuffled labels":
                return inputs[place], classes[place].roll(1)
        return inputs[place], classes[place]

    def edit(self, step: int) -> Callable[[Tensor], Tensor] | None:
        """Return what happens to the gradient of :data:`LAYER` on this rank."""
        if step < BEFORE or self.rank != FAULTY:
            return None
        factor = {"half in a layer": 0.5, "double in a layer": 2.0, "zero in a layer": 0.0, "flipped in a layer": -1.0}
        if self.fault in factor:
            return lambda grad: grad * factor[self.fault]
        if step > BEFORE:  # what follows passes
            return None
        return {"NaN": _with_nan, "exponent bit 7": _with_bit}.get(self.fault)

    def loss_factor(self, step: int) -> float:
        """Return what the loss of this rank is multiplied by."""
        return 0.5 if self.fault == "half" and step >= BEFORE and self.rank == FAULTY else 1.0


def _with_nan(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad.view(-1)[5] = torch.nan
    return grad


def _with_bit(grad: Tensor) -> Tensor:
    wide = grad.float().clone()
    wide.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 30)
    return wide.to(grad.dtype)


def follow(train: Callable[[Data, list[Any]], Callable[[int], None]], fault: str, rank: int) -> list[tuple[Any, ...]]:
    """Train with a fault until it is told; return (steps of the fault, rank, kind, layers, peers) of every event.

    Args:
        train: returns a function that takes a step, and puts the events that it brings into the list.
        fault: of :data:`FAULTS`.
        rank: this one.
    """
    told: list[Any] = []
    step_of = train(Data(fault, rank), told)
    for step in range(BEFORE + AFTER):
        step_of(step)
        if told:
            break
    return [(e.step - BEFORE + 1, e.rank, e.fault, e.layers, e.peers) for e in told]


def check(fault: str, told: list[tuple[Any, ...]]) -> None:
    """Require that the watch has told the fault, the rank and the layer, and nothing else."""
    kinds, layers, most = FAULTS[fault]
    if not kinds:
        assert told == []
        return
    steps, rank, found, where, peers = told[0]
    assert {rank, *peers} == ({TWIN, FAULTY} if kinds == "identical" else {FAULTY}), told
    assert found in kinds.split(), told
    assert where[: len(layers)] == layers, told
    assert bool(where) == bool(layers) or " " in kinds, told
    assert 1 <= steps <= most, told
