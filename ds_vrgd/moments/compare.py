"""The gradients of the ranks side by side: sums per layer and rank, in which a faulty rank shows.

An owner of elements has the gradients of all ranks for them. Deviations are always centred before they are summed, as
in :mod:`ds_vrgd.moments.chan`: where the ranks nearly agree, the difference of two large sums would be all rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_vrgd import kernels
from ds_vrgd.moments.layout import SUM_DTYPE

#: Values beyond this are counted as not finite, and are left out of the sums: sums of their squares leave fp32's range.
LARGEST = 2.0**48
#: Numbers of a layer's sketch. An even divisor of the kernel's tiles.
SKETCH = 16
#: The squared deviations of the other ranks count as at least this share of those of all ranks (fp32's rounding).
LEAST_SHARE = 1e-6
# Columns that the torch code takes at once.
_COLUMNS = 2**16

#: A run of one layer in the columns: (start, elements, layer, index of its first element in the flattened layer).
Run = tuple[int, int, int, int]


class RankSums(NamedTuple):
    """Sums over the elements of each layer, for ``L`` layers and the ``k`` ranks of one exchange.

    Below, ``g`` are the gradients of an element, ``m`` their mean over the ranks and ``d = g - m`` the deviations.
    """

    gram: Tensor  # (L, k + 1, k + 1), products of d, and in the last row and column of m
    square: Tensor  # (L, k), sum of g^2, by itself, so that a gradient of zero has none
    nonfinite: Tensor  # (L, k), number of values that are not finite, or beyond LARGEST
    # (L, k, SKETCH), projections of d on vectors of random signs, the same in every step. Products of two sketches
    # estimate the products of what was projected.
    sketch: Tensor
    # (L, 2, k) int64, the largest squared leave-one-out deviation of one element (leave_one_out()), and the largest
    # d^2: the bits of an fp32 number, times 2^32, plus the element's index in the layer modulo 2^32.
    peak: Tensor

    @property
    def largest(self) -> Tensor:
        """Return both maxima of :attr:`peak`, ``(L, 2, k)`` fp32."""
        return (self.peak >> 32).to(torch.int32).view(torch.float32)

    @property
    def element(self) -> Tensor:
        """Return the indices of their elements in the flattened layer, ``(L, 2, k)``."""
        return self.peak & 0xFFFFFFFF


def columns_of(ranks: int) -> int:
    """Return how many sums a layer has in :class:`Comparison`: gram, square, nonfinite and sketch."""
    return (ranks + 1) ** 2 + 2 * ranks + ranks * SKETCH


def views(sums: Tensor, peak: Tensor) -> RankSums:
    """Return views of ``(L, columns_of(k))`` sums and ``(L, 2, k)`` peaks by name."""
    layers, _, ranks = peak.shape
    gram, square, nonfinite, sketch = sums.split([(ranks + 1) ** 2, ranks, ranks, ranks * SKETCH], dim=1)
    wide = ranks + 1
    return RankSums(gram.view(layers, wide, wide), square, nonfinite, sketch.view(layers, ranks, SKETCH), peak)


def leave_one_out(deviations: Tensor) -> Tensor:
    """Return squared deviations in units of the other ranks' spread, ``(k, n)``: externally studentised residuals.

    ``deviations``, of that shape, are from the mean over the ranks. For independent normal gradients the root is
    Student's t of ``k - 2`` degrees of freedom. Source: Cook, Weisberg, "Residuals and Influence in Regression" (1982),
    section 2.2.1. It is 0 where all ranks agree, and for k < 3; the spread of the others counts as at least
    :data:`LEAST_SHARE` of everybody's.
    """
    ranks = len(deviations)
    if ranks < 3:
        return torch.zeros_like(deviations)
    own = deviations.square() * (ranks / (ranks - 1))
    everybody = deviations.square().sum(0)
    others = torch.maximum(everybody - own, everybody * LEAST_SHARE)
    return (own * (ranks - 2) / others).nan_to_num_(0.0)


def signs_of(rows: Tensor) -> Tensor:
    """Return a sign, 1 or -1, for each number of a row of :data:`SKETCH` elements of a layer; fixed for good."""
    rows = rows & 0xFFFFFFFF
    bits = ((rows ^ (rows >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    bits = (bits ^ (bits >> 15)) & 1
    return 1.0 - 2.0 * bits


def _pieces(runs: Iterable[Run]) -> Iterator[Run]:
    """Cut long runs, where rows of the sketch begin."""
    for start, numel, layer, first in runs:
        done = 0
        while done < numel:
            piece = min(numel - done, _COLUMNS - (first + done) % SKETCH)
            yield start + done, piece, layer, first + done
            done += piece


def add_rows_(rows: Tensor, runs: Iterable[Run], found: RankSums) -> None:
    """Add the columns of the ranks' gradients to the sums, in fp64: the reference, and the way of a CPU.

    Args:
        rows: ``(k, n)``, any floating dtype; row d is the gradient of rank d.
        runs: which columns belong to which layer; columns in no run are padding, and never read.
        found: updated.
    """
    ranks = len(rows)
    for start, numel, layer, first in _pieces(runs):
        values = rows[:, start : start + numel].to(SUM_DTYPE)
        bad = ~(values.abs() <= LARGEST)
        found.nonfinite[layer] += bad.sum(1)
        values = values.masked_fill(bad, 0.0)
        found.square[layer] += values.square().sum(1)
        mean = values.mean(0)
        deviations = values - mean
        joined = torch.cat([deviations, mean[None]])
        found.gram[layer].addmm_(joined, joined.T)
        before = first % SKETCH
        padded = torch.nn.functional.pad(deviations, (before, -(before + numel) % SKETCH)).view(ranks, -1, SKETCH)
        signs = signs_of(torch.arange(padded.shape[1], device=rows.device) + first // SKETCH)
        found.sketch[layer] += torch.einsum("krs,r->ks", padded, signs.to(SUM_DTYPE))
        largest, where = torch.stack([leave_one_out(deviations), deviations.square()]).max(2)
        bits = largest.float().view(torch.int32).long() << 32
        found.peak[layer] = torch.maximum(found.peak[layer], bits | ((where + first) & 0xFFFFFFFF))


class Comparison:
    """The sums of a window over its micro-batches, on this rank's elements.

    Nothing is allocated before the first gradient. Memory: ``8 (columns_of(k) + 2 k)`` bytes per layer.

    Args:
        names: of the layers.
        ranks: the global ranks that each row of a buffer comes from, or the first of those that compute it together.
        group: process group of those ranks: they own all elements together, each of them in one place.
        at_once: chunks of a micro-batch, also those of ranks that are not compared here.

    Attributes:
        across: the means of the nodes side by side, where gradients stay in a node; its ``ranks`` are their first ones.
    """

    def __init__(self, names: Sequence[str], ranks: Sequence[int], group: Any, at_once: int) -> None:
        self.names, self.ranks, self.group, self.at_once = tuple(names), tuple(ranks), group, at_once
        self.across: Comparison | None = None
        self._held: tuple[Tensor, Tensor] | None = None  # sums and peaks, as in views()
        self._runs: dict[Hashable, Any] = {}  # of each buffer: for the kernel, or for add_rows_()
        self._is_clear, self._by_kernel = True, False

    def _open(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return sums and peaks, zero where a window begins."""
        if self._held is None:
            layers, ranks = len(self.names), len(self.ranks)
            sums = torch.zeros(layers, columns_of(ranks), dtype=SUM_DTYPE, device=device)
            self._held = sums, torch.zeros(layers, 2, ranks, dtype=torch.long, device=device)
            self._by_kernel = kernels.usable(torch.empty(0, dtype=torch.float32, device=device))
        elif self._is_clear:
            for held in self._held:
                held.zero_()
        self._is_clear = False
        return self._held

    @property
    def device(self) -> torch.device | None:
        """Return where the gradients are that were compared; None before the first."""
        return None if self._held is None else self._held[0].device

    def add(self, rows: Tensor, buffer: Hashable, runs: Callable[[], Sequence[Run]]) -> None:
        """Add one micro-batch of a buffer.

        Args:
            rows: ``(k, n)``, any floating dtype; the elements of a row are neighbours.
            buffer: stands for the buffer in all windows. Another layout or dtype makes another buffer.
            runs: returns which columns belong to which layer, as in :func:`add_rows_`; called once for each buffer.
        """
        sums, peak = self._open(rows.device)
        if self._by_kernel and rows.dtype != torch.float64:
            from ds_vrgd.kernels.compare import Columns, compare_rows

            if buffer not in self._runs:
                self._runs[buffer] = Columns(runs(), rows.device)
            compare_rows(rows, self._runs[buffer], sums, peak, SKETCH, LARGEST, LEAST_SHARE)
        else:
            if buffer not in self._runs:
                self._runs[buffer] = runs()
            add_rows_(rows, self._runs[buffer], views(sums, peak))

    def drop(self, layers: Sequence[int]) -> None:
        """Forget this window's gradients of some layers."""
        if self._held is not None and not self._is_clear:
            for held in self._held:
                held[list(layers)] = 0

    def clear(self) -> None:
        """Begin the next window."""
        self._is_clear = True
        if self.across is not None:
            self.across.clear()

    def totals(self, device: torch.device) -> RankSums:
        """Return the sums over whole layers, the same on all ranks of the group. A collective: two all-reduces.

        ``device`` is where the ranks can communicate.
        """
        sums, peak = (held.to(device, copy=True) for held in self._open(device))
        if self.group is not None:
            torch.distributed.all_reduce(sums, group=self.group)
            torch.distributed.all_reduce(peak, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return views(sums, peak)
