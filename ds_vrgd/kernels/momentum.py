"""SGD with the ratio in one pass over the shard, LARS in two: the norms of whole layers lie between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, BlockTable
from ds_vrgd.kernels.records import Source
from ds_vrgd.kernels.shared import WARPS, block_row, gradient_and_ratio, store_clamped, store_sum


@triton.jit
def _norms_of_block(source, weights, offsets, mask, layer, partials, blocks, first):
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, None, None, False)
    values = tl.load(weights + offsets, mask)
    store_sum(partials, 0, blocks, first, values * values, mask)
    store_sum(partials, 1, blocks, first, gradient * gradient, mask)
    store_clamped(source, partials, 2, blocks, first, ratio, mask)


@triton.jit(do_not_specialize=["blocks", "first"])
def _norms(source, weights, rows, partials, blocks, first, block: tl.constexpr):
    start, low, high, layer, _ = block_row(rows, block)
    places = tl.arange(0, block)
    if high - low == block:
        _norms_of_block(source, weights, start + places, None, layer, partials, blocks, first)
    else:
        mask = (places >= low) & (places < high)
        _norms_of_block(source, weights, start + places, mask, layer, partials, blocks, first)


def lars_norms(table: BlockTable, shard: int, source: Source, weights: Tensor, partials: Tensor) -> None:
    """Sum the squares of the weights and of the gradient with its ratio.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        source: its gradient, without an average.
        weights: of the shard, fp32.
        partials: ``(4, blocks)``; the shard's blocks take the two sums, and the numbers of elements clamped low and
            high (these two with GSNR only).
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(partials):
            _norms[len(rows),](
                source, weights, rows, partials, table.blocks, table.firsts[shard], block=BLOCK, num_warps=WARPS
            )


@triton.jit
def _momentum_block(
    source, weights, buffer, trust, lr, decay, momentum, offsets, mask, layer, partials, blocks, first,
    nesterov: tl.constexpr,
):  # fmt: skip
    gradient, ratio = gradient_and_ratio(source, offsets, mask, layer, None, None, False)
    values = tl.load(weights + offsets, mask)
    step = gradient + decay * values
    if trust is not None:
        step *= tl.load(trust + layer)
    if buffer is not None:
        moved = tl.load(buffer + offsets, mask) * momentum + step
        tl.store(buffer + offsets, moved, mask)
        if nesterov:
            step += momentum * moved
        else:
            step = moved
    tl.store(weights + offsets, values - lr * step, mask)
    if partials is not None:
        store_clamped(source, partials, 0, blocks, first, ratio, mask)


@triton.jit(do_not_specialize=["blocks", "first"])
def _momentum(
    source, weights, buffer, trust, lr, decay, momentum, rows, partials, blocks, first,
    nesterov: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    start, low, high, layer, _ = block_row(rows, block)
    places = tl.arange(0, block)
    if high - low == block:
        _momentum_block(
            source, weights, buffer, trust, lr, decay, momentum, start + places, None, layer, partials, blocks, first,
            nesterov,
        )  # fmt: skip
    else:
        mask = (places >= low) & (places < high)
        _momentum_block(
            source, weights, buffer, trust, lr, decay, momentum, start + places, mask, layer, partials, blocks, first,
            nesterov,
        )  # fmt: skip


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
    """Update weights and momentum buffer.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        source: its gradient, without an average.
        weights: of the shard, fp32.
        buffer: its momentum buffer, fp32; None for none.
        lr, decay, momentum, nesterov: as the group says.
        trust: ``(layers,)`` fp32, the trust ratios that scale what the buffer takes; None for 1.
        partials: ``(2, blocks)``; the shard's blocks take the numbers of elements clamped low and high. None: not
            counted.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(weights):
            _momentum[len(rows),](
                source, weights, buffer, trust, lr, decay, momentum, rows, partials, table.blocks, table.firsts[shard],
                nesterov=nesterov, block=BLOCK, num_warps=WARPS,
            )  # fmt: skip
