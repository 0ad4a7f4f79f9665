"""LAMB and VR-LAMB in two passes over the shard: the norms of whole layers lie between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.adam import adam_direction, advance_moments
from ds_vrgd.kernels.blocks import BLOCK, BlockTable
from ds_vrgd.kernels.records import AdamState, Source
from ds_vrgd.kernels.shared import WARPS, block_row, gradient_and_ratio, store_clamped, store_sum


@triton.jit
def _advance_block(
    source, state, offsets, mask, layer, index, seed, partials, blocks, first, begins: tl.constexpr
):  # fmt: skip
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, index, seed, begins)
    mean, square = advance_moments(state, gradient, offsets, mask)
    weights = tl.load(state.weights + offsets, mask)
    update = adam_direction(state, mean, square) + state.decay * weights
    store_sum(partials, 0, blocks, first, weights * weights, mask)
    store_sum(partials, 1, blocks, first, update * update, mask)
    store_clamped(source, partials, 2, blocks, first, ratio, mask)


@triton.jit(do_not_specialize=["seed", "blocks", "first"])
def _advance(source, state, seed, rows, partials, blocks, first, begins: tl.constexpr, block: tl.constexpr):
    start, low, high, layer, index = block_row(rows, block)
    places = tl.arange(0, block)
    if high - low == block:
        _advance_block(
            source, state, start + places, None, layer, index + places, seed, partials, blocks, first, begins
        )
    else:
        mask = (places >= low) & (places < high)
        _advance_block(
            source, state, start + places, mask, layer, index + places, seed, partials, blocks, first, begins
        )


def lamb_advance(
    table: BlockTable, shard: int, source: Source, state: AdamState, partials: Tensor, *, seed: int, begins: bool
) -> None:
    """Update the moments and the running mean of the ratio; sum the squares of the weights and of the update.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        source: its gradient.
        state: its weights and moments.
        partials: ``(4, blocks)``; the shard's blocks take the two sums, and the numbers of elements clamped low and
            high (these two with GSNR only).
        seed: of the stochastic rounding, a signed 32-bit number.
        begins: whether the running mean begins in this step, with nothing in it yet.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(partials):
            _advance[len(rows),](
                source, state, seed, rows, partials, table.blocks, table.firsts[shard],
                begins=begins, block=BLOCK, num_warps=WARPS,
            )  # fmt: skip


@triton.jit
def _apply_block(state, rate, offsets, mask):
    weights = tl.load(state.weights + offsets, mask)
    mean, square = tl.load(state.exp_avg + offsets, mask), tl.load(state.exp_avg_sq + offsets, mask)
    update = adam_direction(state, mean, square) + state.decay * weights
    tl.store(state.weights + offsets, weights - rate * update, mask)


@triton.jit
def _apply(state, rates, rows, block: tl.constexpr):
    start, low, high, layer, _ = block_row(rows, block)
    rate = tl.load(rates + layer)
    places = tl.arange(0, block)
    if high - low == block:
        _apply_block(state, rate, start + places, None)
    else:
        _apply_block(state, rate, start + places, (places >= low) & (places < high))


def lamb_apply(table: BlockTable, shard: int, state: AdamState, rates: Tensor) -> None:
    """Update the weights.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        state: its weights and its moments after :func:`lamb_advance`.
        rates: ``(layers,)`` fp32, learning rate times trust ratio.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(rates):
            _apply[len(rows),](state, rates, rows, block=BLOCK, num_warps=WARPS)
