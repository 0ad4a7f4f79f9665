"""The updates in Triton: the formulas of :mod:`ds_vrgd.gsnr` and of the rules in :mod:`ds_vrgd.optim`, block by block.

A kernel is a function of one block of a shard (:class:`~ds_vrgd.kernels.blocks.BlockTable`); :func:`launch` runs it
over all blocks. Sums over a layer are left block by block in ``partials``, ``(columns, blocks)`` fp64, which
:func:`sum_blocks` adds up in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, COLUMNS, BlockTable
from ds_vrgd.kernels.records import AdamState, MomentumState, Source

WARPS = 8
# Blocks of a layer that are summed at once.
CHUNK = 1024
#: Where the squares of a block's values sum to less, some may have left fp32's range: they are summed anew, of values
#: that were multiplied by :data:`GROWTH`.
SMALL_SQUARES, GROWTH = 2.0**-100, 2.0**64

_COLUMNS = tl.constexpr(COLUMNS)
# The least variance of an element, as in ds_vrgd.gsnr.
_LEAST = tl.constexpr(torch.finfo(torch.float32).tiny)
_SMALL, _GROWTH, _SHRINKAGE = tl.constexpr(SMALL_SQUARES), tl.constexpr(GROWTH), tl.constexpr(GROWTH**-2)


# -- the gradient of a step with its ratio ----------------------------------------------------------------------------


@triton.jit
def raw_ratio(source, offsets, mask):
    """Return the mean over the chunks, m2, and the raw ratio (equations 2 and 7), with 0/0 = 0."""
    mean = tl.load(source.total + offsets, mask) / source.parts
    m2 = tl.load(source.m2 + offsets, mask)
    square = mean * mean
    variance = tl.maximum(tl.maximum(m2 / source.k, square * source.gsnr_eps), _LEAST)
    return mean, m2, square / variance


@triton.jit
def normalized_ratio(source, offsets, mask, layer):
    """Return the raw ratio over its mean in the layer (equation 8), with 0/0 = 0."""
    _, _, raw = raw_ratio(source, offsets, mask)
    mean = tl.load(source.means + layer).to(tl.float32)
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
def averaged(source, ratio, offsets, mask, noise):
    """Advance the running mean of the ratio; return it debiased."""
    if source.earlier is not None:
        before = ratio * source.earlier
    else:
        before = tl.load(source.average + offsets, mask).to(tl.float32)
    average = before * source.beta3 + ratio * source.rest3
    if source.average.dtype.element_ty == tl.bfloat16:
        tl.store(source.average + offsets, stochastic_bf16(average, noise), mask)
    else:
        tl.store(source.average + offsets, average, mask)
    return average * source.debias


@triton.jit
def gradient_and_ratio(source, offsets, mask, layer, noise):
    """Return the gradient of the base optimizer, and the normalised ratio before it is clamped (1 without GSNR)."""
    gradient = tl.load((source.total if source.grad is None else source.grad) + offsets, mask)
    if source.scale is not None:
        gradient *= tl.load(source.scale)
    ratio = tl.full(offsets.shape, 1.0, tl.float32)
    if source.m2 is not None:
        ratio = normalized_ratio(source, offsets, mask, layer)
        # equation 9
        factor = tl.minimum(tl.maximum(ratio, source.gamma), 1.0)
        if source.average is not None:
            factor = averaged(source, factor, offsets, mask, noise)
        gradient *= factor
    elif source.average is not None:
        gradient *= tl.load(source.average + offsets, mask).to(tl.float32) * source.debias
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
def store_clamped(source, out, column, blocks, ratio, mask):
    """Store the number of a block's elements whose ratio gamma raises, and of those that 1 lowers."""
    if source.m2 is not None:
        store_sum(out, column, blocks, (ratio < source.gamma).to(tl.float32), mask)
        store_sum(out, column + 1, blocks, (ratio > 1.0).to(tl.float32), mask)


# -- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def ratio_sums(source, state, offsets, mask, layer, noise, out, blocks):
    """Sum the raw ratio, the squared mean gradient and m2: columns 0 to 2."""
    mean, m2, raw = raw_ratio(source, offsets, mask)
    store_sum(out, 0, blocks, raw, mask)
    store_sum(out, 1, blocks, mean * mean, mask)
    store_sum(out, 2, blocks, m2, mask)


@triton.jit
def lars_norms(source, state, offsets, mask, layer, noise, out, blocks):
    """Sum the squares of the weights and of the gradient with its ratio, and count clamped elements: columns 0 to 3."""
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, noise)
    values = tl.load(state.weights + offsets, mask)
    store_sum(out, 0, blocks, values * values, mask)
    store_squares(out, 1, blocks, gradient, mask)
    store_clamped(source, out, 2, blocks, ratio, mask)


@triton.jit
def momentum_step(source, state, offsets, mask, layer, noise, out, blocks):
    """Update weights and momentum buffer (SGD, LARS); count clamped elements if there is ``out``: columns 0, 1."""
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, noise)
    values = tl.load(state.weights + offsets, mask)
    step = gradient + state.decay * values
    if state.trust is not None:
        step *= tl.load(state.trust + layer)
    if state.buffer is not None:
        moved = tl.load(state.buffer + offsets, mask) * state.momentum + step
        tl.store(state.buffer + offsets, moved, mask)
        if state.lookahead is not None:
            step += state.lookahead * moved
        else:
            step = moved
    tl.store(state.weights + offsets, values - state.lr * step, mask)
    if out is not None:
        store_clamped(source, out, 0, blocks, ratio, mask)


@triton.jit
def advance_moments(state, gradient, offsets, mask):
    """Advance both moments of Adam by a gradient, and store them."""
    mean = tl.load(state.exp_avg + offsets, mask)
    mean += state.rest1 * (gradient - mean)
    square = tl.load(state.exp_avg_sq + offsets, mask) * state.beta2 + state.rest2 * gradient * gradient
    tl.store(state.exp_avg + offsets, mean, mask)
    tl.store(state.exp_avg_sq + offsets, square, mask)
    return mean, square


@triton.jit
def adam_direction(state, mean, square):
    """Return the first moment over the root of the second, both debiased."""
    return mean * state.debias1 / (tl.sqrt_rn(square) * state.debias2 + state.eps)


@triton.jit
def adam_step(source, state, offsets, mask, layer, noise, out, blocks):
    """Update weights, moments and the running mean of the ratio (Adam, AdamW); count clamped elements: columns 0, 1."""
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, noise)
    weights = tl.load(state.weights + offsets, mask)
    if state.shrink is not None:
        weights *= state.shrink
    else:
        gradient += state.decay * weights
    mean, square = advance_moments(state, gradient, offsets, mask)
    tl.store(state.weights + offsets, weights - state.lr * adam_direction(state, mean, square), mask)
    store_clamped(source, out, 0, blocks, ratio, mask)


@triton.jit
def lamb_advance(source, state, offsets, mask, layer, noise, out, blocks):
    """Update the moments and the running mean of the ratio; sum squares and count clamped elements: columns 0 to 3.

    The squares are those of the weights and of LAMB's update.
    """
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, noise)
    mean, square = advance_moments(state, gradient, offsets, mask)
    weights = tl.load(state.weights + offsets, mask)
    update = adam_direction(state, mean, square) + state.decay * weights
    store_sum(out, 0, blocks, weights * weights, mask)
    store_sum(out, 1, blocks, update * update, mask)
    store_clamped(source, out, 2, blocks, ratio, mask)


@triton.jit
def lamb_apply(source, state, offsets, mask, layer, noise, out, blocks):
    """Update LAMB's weights, with the moments that :func:`lamb_advance` has left."""
    rate = tl.load(state.rates + layer)
    weights = tl.load(state.weights + offsets, mask)
    mean, square = tl.load(state.exp_avg + offsets, mask), tl.load(state.exp_avg_sq + offsets, mask)
    update = adam_direction(state, mean, square) + state.decay * weights
    tl.store(state.weights + offsets, weights - rate * update, mask)


# -- launches ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["seed", "blocks", "first"])
def _over_block(kernel: tl.constexpr, source, state, seed, rows, partials, blocks, first, block: tl.constexpr):
    """Run ``kernel`` on this program's block: start in the shard, first and last element, layer, index in the layer."""
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    start = tl.multiple_of(tl.load(row), block)
    low, high, layer, index = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    inside = tl.arange(0, block)
    noise = (index + inside).to(tl.uint32) ^ seed.to(tl.uint32)
    out = partials
    if partials is not None:
        out += first + tl.program_id(0)
    # Without a mask the loads are 16 bytes wide, whatever the segments' ends are.
    if high - low == block:
        kernel(source, state, start + inside, None, layer, noise, out, blocks)
    else:
        kernel(source, state, start + inside, (inside >= low) & (inside < high), layer, noise, out, blocks)


def launch(
    kernel: Any,
    table: BlockTable,
    shard: int,
    source: Source | None,
    state: MomentumState | AdamState | None,
    partials: Tensor | None,
    seed: int = 0,
) -> None:
    """Run one of the kernels above over the blocks of a shard.

    Args:
        kernel: the kernel.
        table, shard: blocks of all shards, and the index of the shard.
        source: its gradient; None for :func:`lamb_apply`.
        state: its weights and state; None for :func:`ratio_sums`.
        partials: ``(columns, blocks)``; the kernel writes the columns of the shard's blocks. None for no sums.
        seed: seed of the stochastic rounding, a signed 32-bit number.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(rows):
            _over_block[len(rows),](
                kernel, source, state, seed, rows, partials, table.blocks, table.firsts[shard],
                block=BLOCK, num_warps=WARPS,
            )  # fmt: skip


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
