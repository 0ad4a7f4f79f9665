"""The report on the ranks of a step: their gradients side by side, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_vrgd.moments.compare import RankSums, add_rows_, columns_of, views
from ds_vrgd.moments.layout import SUM_DTYPE
from ds_vrgd.optim.ranks.series import TINY, median_of_rows


@dataclass(frozen=True)
class RankReport:
    """The ranks' gradients of one step side by side: ``L`` layers, ``k`` ranks; tensors on the CPU in fp64.

    A window's micro-batches are compared one by one, and their squares are averaged.

    Attributes:
        step: number of the optimizer step, from 0 where the process began.
        ranks: the global ranks, in the order of the columns.
        layers: names of the layers.
        norms: ``(L, k)``, 2-norm of each rank's gradient.
        distances: ``(L, k)``, distance from the mean over the ranks.
        cosines: ``(L, k)``, cosine with the mean of the other ranks.
        gaps: ``(L, k, k)``, distance between two ranks.
        nonfinite: ``(L, k)`` int64, number of values that are NaN, infinite or beyond 2^48, which count as 0 elsewhere.
        deviations: ``(L, k)``, largest leave-one-out deviation of one element, in standard deviations of the others.
        elements: ``(L, k)`` int64, the index of that element in the flattened layer.
        shares: ``(L, k)``, the share of one element in the squared distance from the mean, where it is largest.
        largest: ``(L, k)`` int64, the index of that element.
        sketches: ``(L, k, 16)``, projections of the deviations on random signs, the same in every step.
        nodes: the same of the nodes' mean gradients, where gradients stay in a node: its ``ranks`` are the first of
            each node. None where there is one node.
    """

    step: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    norms: Tensor
    distances: Tensor
    cosines: Tensor
    gaps: Tensor
    nonfinite: Tensor
    deviations: Tensor
    elements: Tensor
    shares: Tensor
    largest: Tensor
    sketches: Tensor
    nodes: RankReport | None = None

    @classmethod
    def of_sums(
        cls, step: int, layers: Sequence[str], ranks: Sequence[int], sums: RankSums, unit: float = 1.0
    ) -> RankReport:
        """Return the report of sums over whole layers; ``unit`` multiplies the gradients' squares."""
        k = len(ranks)
        gram = sums.gram.to("cpu", SUM_DTYPE) * unit
        centred, mean, square = gram[:, :k, :k], gram[:, :k, k], gram[:, k, k, None]
        own = centred.diagonal(dim1=1, dim2=2)
        norms = sums.square.to("cpu", SUM_DTYPE) * unit
        # The others' mean is (k gbar - g) / (k - 1).
        with_mean = mean + square
        along = k * with_mean - norms
        others = (k * k * square - 2.0 * k * with_mean + norms).clamp_(min=0.0)
        cosines = along / (norms * others).sqrt().clamp_(min=TINY)
        gaps = (own[:, :, None] + own[:, None, :] - 2.0 * centred).clamp_(min=0.0)
        largest, element = sums.largest.cpu().double(), sums.element.cpu()
        return cls(
            step, tuple(ranks), tuple(layers), norms.sqrt(), own.sqrt(), cosines.clamp_(-1.0, 1.0), gaps.sqrt(),
            sums.nonfinite.cpu().long(), largest[:, 0].sqrt(), element[:, 0],
            (largest[:, 1] * unit / own.clamp(min=TINY)).clamp_(max=1.0), element[:, 1],
            sums.sketch.to("cpu", SUM_DTYPE) * math.sqrt(unit),
        )  # fmt: skip

    @classmethod
    def of_gradients(cls, gradients: Sequence[Mapping[str, Tensor]], step: int = 0) -> RankReport:
        """Return the report of gradients that one process holds: what an engine's owner of all elements would find.

        Args:
            gradients: of each rank, by layer; the same layers and shapes for all.
            step: number of the step.

        Raises:
            ValueError: no ranks, or ranks that differ in layers or shapes.
        """
        if not gradients:
            raise ValueError("gradients=[] has no rank: give the gradients of each rank, by layer")
        first, *others = [{layer: tuple(g.shape) for layer, g in of_rank.items()} for of_rank in gradients]
        for rank, shapes in enumerate(others, 1):
            for layer in first.keys() | shapes.keys():
                one, other = (of.get(layer, "nothing") for of in (first, shapes))
                if one != other:
                    raise ValueError(
                        f"rank {rank} has {other} for layer '{layer}', and rank 0 has {one}: give the same layers and "
                        "shapes for all ranks"
                    )
        layers, ranks = list(gradients[0]), len(gradients)
        sums = torch.zeros(len(layers), columns_of(ranks), dtype=SUM_DTYPE)
        found = views(sums, torch.zeros(len(layers), 2, ranks, dtype=torch.long))
        for index, layer in enumerate(layers):
            rows = torch.stack([of_rank[layer].detach().flatten() for of_rank in gradients])
            add_rows_(rows, [(0, rows.shape[1], index, 0)], found)
        return cls.of_sums(step, layers, range(ranks), found)

    def whole(self) -> tuple[list[float], list[float], list[float]]:
        """Return three numbers of each rank for a curve.

        They are the median over the layers of its norm, over the ranks' median; that of its cosine with the other
        ranks; and its largest leave-one-out deviation of an element.
        """
        usual = median_of_rows(self.norms)
        live = usual[:, 0] > 0.0
        if not bool(live.any()):
            nothing = [0.0] * len(self.ranks)
            return nothing, nothing, nothing
        relative = (self.norms / usual)[live].median(0).values
        return relative.tolist(), self.cosines[live].median(0).values.tolist(), self.deviations.amax(0).tolist()
