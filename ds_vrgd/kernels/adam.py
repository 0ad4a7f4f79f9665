"""VR-Adam and VR-AdamW in one pass over the shard, and what LAMB shares with them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, BlockTable
from ds_vrgd.kernels.records import AdamState, Source
from ds_vrgd.kernels.shared import WARPS, block_row, gradient_and_ratio, store_clamped


@triton.jit
def advance_moments(state, gradient, offsets, mask):
    """Both moments with a gradient taken in, and stored."""
    mean = tl.load(state.exp_avg + offsets, mask)
    mean += state.rest1 * (gradient - mean)
    square = tl.load(state.exp_avg_sq + offsets, mask) * state.beta2 + state.rest2 * gradient * gradient
    tl.store(state.exp_avg + offsets, mean, mask)
    tl.store(state.exp_avg_sq + offsets, square, mask)
    return mean, square


@triton.jit
def adam_direction(state, mean, square):
    """First moment over the root of the second, both debiased."""
    return mean * state.debias1 / (tl.sqrt_rn(square) * state.debias2 + state.eps)


@triton.jit
def _adam_block(
    source, state, lr, shrink, offsets, mask, layer, index, seed, partials, blocks, first,
    decoupled: tl.constexpr, begins: tl.constexpr,
):  # fmt: skip
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, index, seed, begins)
    weights = tl.load(state.weights + offsets, mask)
    if decoupled:
        weights *= shrink
    else:
        gradient += state.decay * weights
    mean, square = advance_moments(state, gradient, offsets, mask)
    tl.store(state.weights + offsets, weights - lr * adam_direction(state, mean, square), mask)
    store_clamped(source, partials, 0, blocks, first, ratio, mask)


@triton.jit(do_not_specialize=["seed", "blocks", "first"])
def _adam(
    source, state, lr, shrink, seed, rows, partials, blocks, first,
    decoupled: tl.constexpr, begins: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    start, low, high, layer, index = block_row(rows, block)
    places = tl.arange(0, block)
    if high - low == block:
        _adam_block(
            source, state, lr, shrink, start + places, None, layer, index + places, seed, partials, blocks, first,
            decoupled, begins,
        )  # fmt: skip
    else:
        mask = (places >= low) & (places < high)
        _adam_block(
            source, state, lr, shrink, start + places, mask, layer, index + places, seed, partials, blocks, first,
            decoupled, begins,
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
    """Update weights, moments and the running mean of the ratio; count the elements whose ratio is clamped.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        source: its gradient.
        state: its weights and moments.
        partials: ``(2, blocks)``; the shard's blocks take the numbers of elements clamped low and high.
        lr: learning rate.
        shrink: ``1 - lr * weight_decay``, used where decay is decoupled.
        seed: of the stochastic rounding, a signed 32-bit number.
        decoupled: whether weight decay shrinks the weights (AdamW) rather than being added to the gradient.
        begins: whether the running mean begins in this step, with nothing in it yet.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(partials):
            _adam[len(rows),](
                source, state, lr, shrink, seed, rows, partials, table.blocks, table.firsts[shard],
                decoupled=decoupled, begins=begins, block=BLOCK, num_warps=WARPS,
            )  # fmt: skip
