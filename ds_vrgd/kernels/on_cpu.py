"""The update kernels of CPU tensors: each piece of a shard goes through all operations while it is in the cache.

The names and the arguments are those of the Triton kernels, which also say what is computed. What differs is
``partials``: here it takes the sums by layer at once. Where there is a choice, an operation that torch vectorises was
taken: comparisons to bool, ``masked_fill`` and norms that are summed in fp64 are 5 to 20 times slower than a product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ds_vrgd.kernels.blocks import BlockTable
from ds_vrgd.kernels.records import AdamState, Source

# Elements that each thread has of a piece: the ten tensors of an Adam step take 10 MB then, which the last cache holds.
# Smaller pieces are slower, for torch needs about 2 us to begin each of some 25 operations.
ELEMENTS_A_THREAD = 2**18

# torch's fused Adam debiases by the step that it is told: none is left after infinitely many.
_DEBIASED = torch.tensor(math.inf)


class _Piece(NamedTuple):
    """A run of one layer's elements: where in the shard, which layer, which of the layer's elements comes first."""

    run: slice
    layer: int
    first: int


def _pieces(table: BlockTable, shard: int) -> Iterator[_Piece]:
    size = ELEMENTS_A_THREAD * torch.get_num_threads()
    for start, numel, layer, first in table.segments[shard]:
        for offset in range(0, numel, size):
            end = start + min(offset + size, numel)
            yield _Piece(slice(start + offset, end), layer, first + offset)


class _Scratch:
    """Memory for the values in between, so that they stay in the cache, too.

    Args:
        table, shard: whose pieces are to fit.
        count: tensors.
    """

    def __init__(self, table: BlockTable, shard: int, count: int) -> None:
        largest = max((numel for _, numel, _, _ in table.segments[shard]), default=0)
        size = min(largest, ELEMENTS_A_THREAD * torch.get_num_threads())
        self._tensors = [torch.empty(size) for _ in range(count)]

    def of(self, piece: _Piece) -> list[Tensor]:
        """Of the piece's size, uninitialised."""
        numel = piece.run.stop - piece.run.start
        return [tensor[:numel] for tensor in self._tensors]


class _Ratio:
    """Gradient and ratio of a source, piece by piece.

    Args:
        source: of the shard.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._reduces = source.m2 is not None
        self._grad, self._total, self._m2, self._average = (
            torch.empty(0) if tensor is None else tensor.view(-1)
            for tensor in (
                source.total if source.grad is None else source.grad,
                source.total,
                source.m2,
                source.average,
            )
        )
        self._scale = 1.0 if source.scale is None else float(source.scale)
        self._means: list[float] = [] if source.means is None else source.means.tolist()
        # k * (total / parts)**2 / m2, the constants at the end: the floor of the variance is a cap of the ratio.
        self._factor = source.k / source.parts**2
        self._cap = 1.0 / (source.gsnr_eps * self._factor) if self._reduces else 0.0

    def raw(self, piece: _Piece, out: Tensor) -> tuple[float, float, float]:
        """Sums over the piece of the raw ratio (equations 2 and 7), of the squared mean gradient and of m2."""
        total, m2 = self._total[piece.run], self._m2[piece.run]
        square = torch.mul(total, total, out=out).sum().item() / self._source.parts**2
        ratio = self._divide(piece, out).sum().item() * self._factor
        return ratio, square, m2.sum().item()

    def _divide(self, piece: _Piece, square: Tensor) -> Tensor:
        """Squared total over m2, with 0/0 = 0, in place."""
        return square.div_(self._m2[piece.run]).nan_to_num_(0.0, self._cap).clamp_max_(self._cap)

    def gradient(self, piece: _Piece, out: Tensor, spare: Tensor, seed: int, begins: bool) -> tuple[float, float]:
        """The gradient that the base optimizer takes, in ``out``; returns how many elements are clamped low and high.

        Args:
            piece: of the shard.
            out, spare: of its size.
            seed: of the stochastic rounding.
            begins: whether the running mean begins in this step.
        """
        source, grad = self._source, self._grad[piece.run]
        if not self._reduces:
            torch.mul(grad, self._scale, out=out)
            return 0.0, 0.0
        mean = self._means[piece.layer]
        total = self._total[piece.run]
        ratio = self._divide(piece, torch.mul(total, total, out=out)).mul_(self._factor / (mean or 1.0))
        low = torch.lt(ratio, source.gamma, out=spare).sum().item()
        high = torch.gt(ratio, 1.0, out=spare).sum().item()
        ratio.clamp_(source.gamma, 1.0)
        factor = self._scale
        if source.average is not None:
            ratio = self._averaged(piece, ratio, spare, seed, begins)
            factor *= source.debias
        torch.mul(ratio, grad, out=out)
        if factor != 1.0:
            out.mul_(factor)
        return low, high

    def _averaged(self, piece: _Piece, ratio: Tensor, spare: Tensor, seed: int, begins: bool) -> Tensor:
        """Advance the running mean of the ratio; returns it, not debiased."""
        source, kept = self._source, self._average[piece.run]
        average = kept if kept.dtype == torch.float32 else spare
        if begins:
            torch.mul(ratio, source.earlier, out=average)
        elif average is not kept:
            average.copy_(kept)
        average.mul_(source.beta3).add_(ratio, alpha=source.rest3)
        if average is not kept:
            kept.copy_(_stochastic_bf16(average, piece.first, seed))
        return average


def _stochastic_bf16(values: Tensor, first: int, seed: int) -> Tensor:
    """fp32 values rounded to bf16, still as fp32: the bits of ``gsnr.round_stochastically``, in 32-bit arithmetic.

    Args:
        values: contiguous.
        first: which of the layer's elements the first is.
        seed: signed.
    """
    x = torch.arange(len(values), dtype=torch.int32).add_(_signed(first)).bitwise_xor_(seed)
    # The right shift of signed integers brings in the sign: it is masked out.
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).bitwise_and_(0xFFFF)
    return x.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)


def _signed(number: int) -> int:
    """The 32-bit integer of the same bits."""
    return (number + 2**31) % 2**32 - 2**31


def empty_partials(table: BlockTable, columns: int) -> Tensor:
    """``(columns, layers)`` fp64, for the kernels to add their sums to."""
    return torch.zeros(columns, table.layers, dtype=torch.float64)


def sum_blocks(table: BlockTable, partials: Tensor) -> Tensor:
    """The sums by layer, ``(columns, layers)``: they are complete."""
    return partials


class _Sums:
    """Sums by layer, in fp64, of what comes piece by piece."""

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}

    def add(self, piece: _Piece, *values: float) -> None:
        """Take a piece's."""
        before = self._sums.get(piece.layer)
        self._sums[piece.layer] = (
            list(values) if before is None else [a + b for a, b in zip(before, values, strict=True)]
        )

    def write(self, partials: Tensor) -> None:
        """Bring them to their layers' columns."""
        for layer, values in self._sums.items():
            partials[: len(values), layer] += torch.tensor(values, dtype=torch.float64)


def ratio_sums(table: BlockTable, shard: int, source: Source, partials: Tensor) -> None:
    """Sums over a shard's layers of the raw ratio, of the squared mean gradient and of m2."""
    ratio, sums, scratch = _Ratio(source), _Sums(), _Scratch(table, shard, 1)
    for piece in _pieces(table, shard):
        sums.add(piece, *ratio.raw(piece, *scratch.of(piece)))
    sums.write(partials)


def _square(values: Tensor, spare: Tensor) -> float:
    """Sum of the squares. Torch sums pairwise; a dot product would lose a digit."""
    return torch.mul(values, values, out=spare).sum().item()


def _fused_adam(state: AdamState, run: slice, weights: Tensor, gradient: Tensor, lr: float, decay: float) -> None:
    """Advance both moments, and subtract ``lr`` times the debiased direction from ``weights``."""
    torch._fused_adam_(
        [weights], [gradient], [state.exp_avg.view(-1)[run]], [state.exp_avg_sq.view(-1)[run]], [], [_DEBIASED],
        lr=lr * state.debias1 / state.debias2, beta1=1.0 - state.rest1, beta2=state.beta2, weight_decay=decay,
        eps=state.eps / state.debias2, amsgrad=False, maximize=False,
    )  # fmt: skip


def adam_step(
    table: BlockTable,
    shard: int,
    source: Source,
    state: AdamState,
    partials: Tensor,
    *,
    lr: float,
    shrink: float,
    seed: int,
    decoupled: bool,
    begins: bool,
) -> None:
    """Update weights, moments and the running mean of the ratio; count the elements whose ratio is clamped."""
    ratio, sums, scratch = _Ratio(source), _Sums(), _Scratch(table, shard, 2)
    weights = state.weights.view(-1)
    for piece in _pieces(table, shard):
        gradient, spare = scratch.of(piece)
        sums.add(piece, *ratio.gradient(piece, gradient, spare, seed, begins))
        own = weights[piece.run]
        if decoupled:
            own.mul_(shrink)
        _fused_adam(state, piece.run, own, gradient, lr, 0.0 if decoupled else state.decay)
    sums.write(partials)


def lamb_advance(
    table: BlockTable, shard: int, source: Source, state: AdamState, partials: Tensor, *, seed: int, begins: bool
) -> None:
    """Update the moments and the running mean of the ratio; sum the squares of the weights and of the update."""
    ratio, sums, scratch = _Ratio(source), _Sums(), _Scratch(table, shard, 2)
    weights = state.weights.view(-1)
    for piece in _pieces(table, shard):
        gradient, update = scratch.of(piece)
        clamped = ratio.gradient(piece, gradient, update, seed, begins)
        own = weights[piece.run]
        # What Adam would do to weights of 0 at a rate of -1 is its direction.
        _fused_adam(state, piece.run, update.zero_(), gradient, -1.0, 0.0)
        update.add_(own, alpha=state.decay)
        sums.add(piece, _square(own, gradient), _square(update, gradient), *clamped)
    sums.write(partials)


def lamb_apply(table: BlockTable, shard: int, state: AdamState, rates: Tensor) -> None:
    """Update the weights."""
    scratch, rate = _Scratch(table, shard, 1), rates.tolist()
    weights, mean, square = (t.view(-1) for t in (state.weights, state.exp_avg, state.exp_avg_sq))
    for piece in _pieces(table, shard):
        (root,) = scratch.of(piece)
        torch.sqrt(square[piece.run], out=root).mul_(state.debias2).add_(state.eps)
        own = weights[piece.run]
        step = rate[piece.layer]
        own.mul_(1.0 - step * state.decay).addcdiv_(mean[piece.run], root, value=-step * state.debias1)


def lars_norms(table: BlockTable, shard: int, source: Source, weights: Tensor, partials: Tensor) -> None:
    """Sum the squares of the weights and of the gradient with its ratio."""
    ratio, sums, scratch = _Ratio(source), _Sums(), _Scratch(table, shard, 2)
    weights = weights.view(-1)
    for piece in _pieces(table, shard):
        gradient, spare = scratch.of(piece)
        clamped = ratio.gradient(piece, gradient, spare, 0, False)
        own = weights[piece.run]
        sums.add(piece, _square(own, spare), _square(gradient, spare), *clamped)
    sums.write(partials)


def momentum_step(
    table: BlockTable,
    shard: int,
    source: Source,
    weights: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    decay: float,
    momentum: float,
    nesterov: bool,
    trust: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    """Update weights and momentum buffer."""
    ratio, sums, scratch = _Ratio(source), _Sums(), _Scratch(table, shard, 2)
    weights, trusts = weights.view(-1), None if trust is None else trust.tolist()
    for piece in _pieces(table, shard):
        step, spare = scratch.of(piece)
        sums.add(piece, *ratio.gradient(piece, step, spare, 0, False))
        own = weights[piece.run]
        if decay:
            step.add_(own, alpha=decay)
        if trusts is not None:
            step.mul_(trusts[piece.layer])
        if buffer is not None:
            moved = buffer.view(-1)[piece.run].mul_(momentum).add_(step)
            step = step.add_(moved, alpha=momentum) if nesterov else moved
        own.sub_(step, alpha=lr)
    if partials is not None:
        sums.write(partials)
