"""Controls of the ratio: each keeps one property of the ratio and destroys the others.

The seam to the product is one name: ``VROptimizer`` gets the passes of a step from
``ds_vrgd.optim.optimizer.passes_over``. Inside :func:`controlled` that name gives torch's passes, also on a GPU, and
the factor of every layer goes through a :class:`Control`. The factor is what scales the gradient: r, or phat where the
ratio is averaged. The running mean in the state remains the optimizer's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import LayerTable, Moments
from ds_vrgd.optim import optimizer
from ds_vrgd.optim.observer import Shard
from ds_vrgd.optim.passes import Piece, Rule, TorchPasses

IDENTITY = "identity"
#: The factor that an element gets in place of its own.
CONTROLS = {
    "permuted": "that of another element of the layer, drawn anew in each step",
    "layer mean": "the mean of the layer",
    "previous": "its own of the step before; in the first step its own",
    "resampled": "drawn from the layer's factors, with replacement",
    "permuted once": "that of another element of the layer, the same one in all steps",
    "constant": "0.52 everywhere",
}
#: The mean factor of gradients that are pure noise, at k = 32 and 64. In Adam and LAMB a constant cancels, up to eps;
#: in Momentum it is a factor of the rate, which is tuned.
CONSTANT = 0.52


class Control:
    """The replacement of the factors of one run.

    Args:
        name: of ``CONTROLS``, or ``IDENTITY``, which changes nothing.
        seed: of the permutations and samples.
    """

    def __init__(self, name: str, seed: int) -> None:
        if name not in (IDENTITY, *CONTROLS):
            raise ValueError(f"control={name!r} is unknown; choose from {', '.join((IDENTITY, *CONTROLS))}")
        self._name, self._seed = name, seed
        self._generator: torch.Generator | None = None
        self._kept: dict[Tensor, Tensor] = {}  # by layer: the permutation, or the factor of the step before

    def __call__(self, layer: Tensor, ratio: Tensor, debias: float) -> Tensor:
        """Return the replacement of a layer's ratio, which is not changed.

        Args:
            layer: the parameter.
            ratio: of the whole layer: r, or the running mean p.
            debias: the divisor that turns the ratio into the factor; 1 for r.
        """
        if self._name == IDENTITY:
            return ratio
        if self._name == "constant":
            return torch.full_like(ratio, CONSTANT * debias)
        if self._name == "layer mean":
            return ratio.mean().expand_as(ratio)
        if self._name == "previous":
            factor = ratio / debias  # a copy: the memory of a ratio is used again
            before, self._kept[layer] = self._kept.get(layer, factor), factor
            return before * debias
        return ratio.flatten()[self._indices(layer, ratio)].view_as(ratio)

    def _indices(self, layer: Tensor, ratio: Tensor) -> Tensor:
        """Return the indices of the elements whose ratios are used, flat."""
        if layer in self._kept:
            return self._kept[layer]
        if self._generator is None:
            self._generator = torch.Generator(ratio.device).manual_seed(self._seed)
        drawing: dict[str, Any] = {"generator": self._generator, "device": ratio.device}
        if self._name == "resampled":
            return torch.randint(ratio.numel(), (ratio.numel(),), **drawing)
        permutation = torch.randperm(ratio.numel(), **drawing)
        if self._name == "permuted once":
            self._kept[layer] = permutation
        return permutation


class ControlledPasses(TorchPasses):
    """Torch's passes with replaced ratios; in plain PyTorch, where every tensor is a whole layer.

    Attributes:
        control: the replacement.
    """

    control: Control

    def _pieces(self) -> Iterator[Piece]:
        for index, segments in enumerate(self.table.segments):
            yield Piece(self, index, None, segments[0][2], 0)

    def _ratio(self, piece: Piece) -> Tensor:
        shard = piece.shard
        debias = 1.0 - shard.group["beta3"] ** shard.ratios if self._averages else 1.0
        return self.control(shard.param, super()._ratio(piece), debias)


@contextmanager
def controlled(control: Control | None) -> Iterator[None]:
    """Replace the ratios of every optimizer step inside by those of a control; None replaces nothing."""
    if control is None:
        yield
        return

    def passes_over(
        rule: Rule, shards: Sequence[Shard], table: LayerTable, moments: Sequence[Moments], k: int
    ) -> ControlledPasses:
        passes = ControlledPasses(rule, shards, table, moments, k)
        passes.control = control
        return passes

    own = optimizer.passes_over  # type: ignore[attr-defined]
    optimizer.passes_over = passes_over  # type: ignore[attr-defined]
    try:
        yield
    finally:
        optimizer.passes_over = own  # type: ignore[attr-defined]
