"""The updates in Triton: the formulas of :mod:`ds_vrgd.gsnr` and of the rules in :mod:`ds_vrgd.optim`, block by block.

A kernel is a function of one block of a shard (:class:`~ds_vrgd.kernels.blocks.BlockTable`); :class:`Launcher` runs it
over the blocks of all shards. Sums over a layer are left block by block in ``partials``, ``(columns, blocks)`` fp64,
which :func:`sum_blocks` adds up in a fixed order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, COLUMNS, GROWTH, SMALL_SQUARES, BlockTable
from ds_vrgd.kernels.records import Columns, ShardCall, Tensors

WARPS = 8
# Blocks of a layer that are summed at once.
CHUNK = 1024

_COLUMNS, _FIELDS = tl.constexpr(COLUMNS), tl.constexpr(len(Tensors._fields))
# The least variance of an element, as in ds_vrgd.gsnr.
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
_SMALL, _GROWTH, _SHRINKAGE = tl.constexpr(SMALL_SQUARES), tl.constexpr(GROWTH), tl.constexpr(GROWTH**-2)


# -- the gradient of a step with its ratio ----------------------------------------------------------------------------


@triton.jit
def raw_ratio(shard, numbers, offsets, mask):
    """Return the mean over the chunks, m2, and the raw ratio (equations 2 and 7), with 0/0 = 0."""
    mean = tl.load(shard.total + offsets, mask) / numbers.parts
    m2 = tl.load(shard.m2 + offsets, mask)
    square = mean * mean
    variance = tl.maximum(tl.maximum(m2 / numbers.k, square * numbers.gsnr_eps), _LEAST)
    return mean, m2, square / variance


@triton.jit
def normalized_ratio(shard, numbers, columns, offsets, mask, layer):
    """Return the raw ratio over its mean in the layer (equation 8), with 0/0 = 0."""
    _, _, raw = raw_ratio(shard, numbers, offsets, mask)
    mean = tl.load(columns.means + layer).to(tl.float32)
    return raw / tl.where(mean == 0.0, 1.0, mean)


@triton.jit
def stochastic_bf16(values, noise):
    """Round fp32 values to bf16: up with the probability of the bits that are cut off (``gsnr.round_stochastically``).

    ``noise`` is the element's index in its layer, mixed with the step's seed.
    """
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D
    noise = (noise ^ (noise >> 15)) * 0x846CA68B
    noise = noise ^ (noise >> 16)
    bits = values.to(tl.uint32, bitcast=True) + (noise & 0xFFFF)
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def averaged(shard, numbers, ratio, offsets, mask, noise):
    """Advance the running mean of the ratio; return it debiased."""
    if numbers.earlier is not None:
        before = ratio * numbers.earlier
    else:
        before = tl.load(shard.average + offsets, mask).to(tl.float32)
    average = before * numbers.beta3 + ratio * numbers.rest3
    if shard.average.dtype.element_ty == tl.bfloat16:
        tl.store(shard.average + offsets, stochastic_bf16(average, noise), mask)
    else:
        tl.store(shard.average + offsets, average, mask)
    return average * numbers.debias


@triton.jit
def gradient_and_ratio(shard, numbers, columns, offsets, mask, layer, noise):
    """Return the gradient of the base optimizer, and the normalised ratio before it is clamped (1 without GSNR)."""
    gradient = tl.load((shard.total if shard.grad is None else shard.grad) + offsets, mask)
    if shard.scale is not None:
        gradient *= tl.load(shard.scale)
    ratio = tl.full(offsets.shape, 1.0, tl.float32)
    if shard.m2 is not None:
        ratio = normalized_ratio(shard, numbers, columns, offsets, mask, layer)
        # equation 9
        factor = tl.minimum(tl.maximum(ratio, numbers.gamma), 1.0)
        if shard.average is not None:
            factor = averaged(shard, numbers, factor, offsets, mask, noise)
        gradient *= factor
    elif shard.average is not None:
        gradient *= tl.load(shard.average + offsets, mask).to(tl.float32) * numbers.debias
    return gradient, ratio


# -- sums of a block --------------------------------------------------------------------------------------------------


@triton.jit
def store_sum(out, column, blocks, values, mask):
    """Store the sum of a block's values; ``out`` is where column 0 has it."""
    if mask is not None:
        values = tl.where(mask, values, 0.0)
    tl.store(out + column * blocks, tl.sum(values, 0))


@triton.jit
def store_squares(out, column, blocks, values, mask):
    """Store the sum of the squares of a block's values; values whose squares leave fp32's range are grown first."""
    if mask is not None:
        values = tl.where(mask, values, 0.0)
    total = tl.sum(values * values, 0)
    wide = total.to(tl.float64)
    if total < _SMALL:
        grown = values * _GROWTH
        wide = tl.sum(grown * grown, 0).to(tl.float64) * _SHRINKAGE
    tl.store(out + column * blocks, wide)


@triton.jit
def store_clamped(shard, numbers, out, column, blocks, ratio, mask):
    """Store the number of a block's elements whose ratio gamma raises, and of those that 1 lowers."""
    if shard.m2 is not None:
        store_sum(out, column, blocks, (ratio < numbers.gamma).to(tl.float32), mask)
        store_sum(out, column + 1, blocks, (ratio > 1.0).to(tl.float32), mask)


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def ratio_sums(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Sum the raw ratio, the squared mean gradient and m2: columns 0 to 2."""
    mean, m2, raw = raw_ratio(shard, numbers, offsets, mask)
    store_sum(out, 0, blocks, raw, mask)
    store_sum(out, 1, blocks, mean * mean, mask)
    store_sum(out, 2, blocks, m2, mask)


@triton.jit
def lars_norms(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Sum the squares of the weights and of the gradient with its ratio, and count clamped elements: columns 0 to 3."""
    gradient, ratio = gradient_and_ratio(shard, numbers, columns, offsets, mask, layer, noise)
    values = tl.load(shard.weights + offsets, mask)
    store_sum(out, 0, blocks, values * values, mask)
    store_squares(out, 1, blocks, gradient, mask)
    store_clamped(shard, numbers, out, 2, blocks, ratio, mask)


@triton.jit
def momentum_step(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Update weights and momentum buffer (SGD, LARS); count clamped elements if there is ``out``: columns 0, 1."""
    gradient, ratio = gradient_and_ratio(shard, numbers, columns, offsets, mask, layer, noise)
    values = tl.load(shard.weights + offsets, mask)
    step = gradient + rule.decay * values
    if columns.trust is not None:
        step *= tl.load(columns.trust + layer)
    if shard.buffer is not None:
        moved = tl.load(shard.buffer + offsets, mask) * rule.momentum + step
        tl.store(shard.buffer + offsets, moved, mask)
        if rule.lookahead is not None:
            step += rule.lookahead * moved
        else:
            step = moved
    tl.store(shard.weights + offsets, values - rule.lr * step, mask)
    if out is not None:
        store_clamped(shard, numbers, out, 0, blocks, ratio, mask)


@triton.jit
def advance_moments(shard, rule, gradient, offsets, mask):
    """Advance both moments of Adam by a gradient, and store them."""
    mean = tl.load(shard.exp_avg + offsets, mask)
    mean += rule.rest1 * (gradient - mean)
    square = tl.load(shard.exp_avg_sq + offsets, mask) * rule.beta2 + rule.rest2 * gradient * gradient
    tl.store(shard.exp_avg + offsets, mean, mask)
    tl.store(shard.exp_avg_sq + offsets, square, mask)
    return mean, square


@triton.jit
def adam_direction(rule, mean, square):
    """Return the first moment over the root of the second, both debiased."""
    return mean * rule.debias1 / (tl.sqrt_rn(square) * rule.debias2 + rule.eps)


@triton.jit
def adam_step(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Update weights, moments and the running mean of the ratio (Adam, AdamW); count clamped elements: columns 0, 1."""
    gradient, ratio = gradient_and_ratio(shard, numbers, columns, offsets, mask, layer, noise)
    weights = tl.load(shard.weights + offsets, mask)
    if rule.shrink is not None:
        weights *= rule.shrink
    else:
        gradient += rule.decay * weights
    mean, square = advance_moments(shard, rule, gradient, offsets, mask)
    tl.store(shard.weights + offsets, weights - rule.lr * adam_direction(rule, mean, square), mask)
    store_clamped(shard, numbers, out, 0, blocks, ratio, mask)


@triton.jit
def lamb_advance(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Update the moments and the running mean of the ratio; sum squares and count clamped elements: columns 0 to 3.

    The squares are those of the weights and of LAMB's update.
    """
    gradient, ratio = gradient_and_ratio(shard, numbers, columns, offsets, mask, layer, noise)
    mean, square = advance_moments(shard, rule, gradient, offsets, mask)
    weights = tl.load(shard.weights + offsets, mask)
    update = adam_direction(rule, mean, square) + rule.decay * weights
    store_sum(out, 0, blocks, weights * weights, mask)
    store_sum(out, 1, blocks, update * update, mask)
    store_clamped(shard, numbers, out, 2, blocks, ratio, mask)


@triton.jit
def lamb_apply(shard, numbers, rule, columns, offsets, mask, layer, noise, out, blocks):
    """Update LAMB's weights, with the moments that :func:`lamb_advance` has left."""
    rate = tl.load(columns.trust + layer)
    weights = tl.load(shard.weights + offsets, mask)
    mean, square = tl.load(shard.exp_avg + offsets, mask), tl.load(shard.exp_avg_sq + offsets, mask)
    update = adam_direction(rule, mean, square) + rule.decay * weights
    tl.store(shard.weights + offsets, weights - rate * update, mask)


# -- launches ---------------------------------------------------------------------------------------------------------


@triton.jit
def _located(like, address, aligned: tl.constexpr):
    """Return the pointer that is stored at ``address``, of the type of ``like``."""
    pointer = tl.load(address).to(like.dtype)
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["seed", "blocks", "first"])
def _over_block(
    kernel: tl.constexpr, like, addresses, numbers, rule, seed, columns, rows, partials, blocks, first,
    block: tl.constexpr, aligned: tl.constexpr,
):  # fmt: skip
    """Run ``kernel`` on this program's block, a row of :attr:`BlockTable.rows`."""
    number = first + tl.program_id(0)
    row = rows + number.to(tl.int64) * _COLUMNS
    start = tl.multiple_of(tl.load(row), block)
    low, high, layer, index = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    at = addresses + tl.load(row + 5) * _FIELDS
    shard = Tensors(
        _located(like.weights, at + 0, aligned) if like.weights is not None else None,
        _located(like.grad, at + 1, aligned) if like.grad is not None else None,
        _located(like.total, at + 2, aligned) if like.total is not None else None,
        _located(like.m2, at + 3, aligned) if like.m2 is not None else None,
        _located(like.average, at + 4, aligned) if like.average is not None else None,
        _located(like.buffer, at + 5, aligned) if like.buffer is not None else None,
        _located(like.exp_avg, at + 6, aligned) if like.exp_avg is not None else None,
        _located(like.exp_avg_sq, at + 7, aligned) if like.exp_avg_sq is not None else None,
        _located(like.scale, at + 8, False) if like.scale is not None else None,
    )
    inside = tl.arange(0, block)
    noise = (index + inside).to(tl.uint32) ^ seed.to(tl.uint32)
    out = partials
    if partials is not None:
        out += number
    # Without a mask the loads are 16 bytes wide, whatever the segments' ends are.
    if high - low == block:
        kernel(shard, numbers, rule, columns, start + inside, None, layer, noise, out, blocks)
    else:
        mask = (inside >= low) & (inside < high)
        kernel(shard, numbers, rule, columns, start + inside, mask, layer, noise, out, blocks)


class Launcher:
    """The shards of a step, for all kernels that run over them.

    A launch covers neighbouring shards that have the same numbers and lack the same tensors: a parameter each, where
    nobody has put them into one flat tensor, and then a model is a few launches. The kernels find a shard's tensors by
    their addresses.
    """

    def __init__(self, table: BlockTable, calls: Sequence[ShardCall]) -> None:
        self._table = table
        addresses: list[list[int]] = []
        self._runs: list[tuple[slice, bool, ShardCall]] = []
        last: Any = None
        for call, (first, end) in zip(calls, itertools.pairwise(table.bounds), strict=True):
            tensors, *numbers = call
            own = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            addresses.append(own)
            if first == end:
                continue
            aligned = math.gcd(16, *own[:-1]) == 16  # a scale is read alone, and may lie anywhere
            kind = [aligned, numbers, [None if tensor is None else tensor.dtype for tensor in tensors]]
            if kind == last:
                first = self._runs.pop()[0].start
            last = kind
            self._runs.append((slice(first, end), aligned, call))
        # From pinned memory, for which the host does not wait.
        host = torch.tensor(addresses, dtype=torch.long)
        device = table.spans.device
        self._addresses = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    def launch(self, kernel: Any, columns: Columns, partials: Tensor | None) -> None:
        """Run one of the kernels above over all blocks; it writes ``partials``, ``(columns, blocks)``, if there are."""
        with torch.cuda.device_of(self._addresses):
            for run, aligned, (like, numbers, rule, seed) in self._runs:
                _over_block[run.stop - run.start,](
                    kernel, like, self._addresses, numbers, rule, seed, columns, self._table.rows, partials,
                    self._table.blocks, run.start, block=BLOCK, aligned=aligned, num_warps=WARPS,
                )  # fmt: skip

    def sums(self, kernel: Any, columns: Columns, count: int) -> Tensor:
        """Run a kernel and return the ``count`` sums that it makes of each layer, ``(count, layers)`` fp64."""
        partials = empty_partials(self._table, count)
        self.launch(kernel, columns, partials)
        return sum_blocks(self._table, partials)


@triton.jit(do_not_specialize=["blocks", "layers"])
def _sum_blocks(partials, spans, out, blocks, layers, chunk: tl.constexpr):
    layer, column = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(spans + 2 * layer), tl.load(spans + 2 * layer + 1)
    # The order of the sum is fixed: by index in the chunk, then over the chunk.
    inside = tl.arange(0, chunk)
    total = tl.zeros([chunk], tl.float64)
    start = count * 0
    while start < count:
        total += tl.load(partials + column * blocks + first + start + inside, start + inside < count, other=0.0)
        start += chunk
    tl.store(out + column * layers + layer, tl.sum(total, 0))


def empty_partials(table: BlockTable, columns: int) -> Tensor:
    """Return ``(columns, blocks)`` fp64 for the kernels to write their sums into."""
    return torch.empty(columns, table.blocks, dtype=torch.float64, device=table.spans.device)


def sum_blocks(table: BlockTable, partials: Tensor) -> Tensor:
    """Return the sums over each layer's blocks, in a fixed order, of ``partials``, ``(columns, blocks)`` fp64.

    They are ``(columns, layers)`` fp64; 0 for layers without a block here.
    """
    columns = len(partials)
    out = torch.empty(columns, table.layers, dtype=torch.float64, device=partials.device)
    with torch.cuda.device_of(out):
        _sum_blocks[table.layers, columns](partials, table.spans, out, table.blocks, table.layers, chunk=CHUNK)
    return out
