"""Sums over whole layers of what the ratio is made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, BlockTable
from ds_vrgd.kernels.records import Source
from ds_vrgd.kernels.shared import WARPS, block_row, raw_ratio, store_sum


@triton.jit
def _sums_of_block(source, offsets, mask, partials, blocks, first):
    mean, m2, raw = raw_ratio(source, offsets, mask)
    store_sum(partials, 0, blocks, first, raw, mask)
    store_sum(partials, 1, blocks, first, mean * mean, mask)
    store_sum(partials, 2, blocks, first, m2, mask)


@triton.jit(do_not_specialize=["blocks", "first"])
def _ratio_sums(source, rows, partials, blocks, first, block: tl.constexpr):
    start, low, high, _, _ = block_row(rows, block)
    places = tl.arange(0, block)
    # Without a mask the loads are 16 bytes wide, whatever the segments' ends are.
    if high - low == block:
        _sums_of_block(source, start + places, None, partials, blocks, first)
    else:
        _sums_of_block(source, start + places, (places >= low) & (places < high), partials, blocks, first)


def ratio_sums(table: BlockTable, shard: int, source: Source, partials: Tensor) -> None:
    """Sums over a shard's blocks of the raw ratio, of the squared mean gradient and of m2.

    Args:
        table: of the blocks.
        shard: which of the table's shards.
        source: its moments.
        partials: ``(3, blocks)``; the shard's blocks are overwritten.
    """
    rows = table.rows[shard]
    if len(rows):
        with torch.cuda.device_of(partials):
            _ratio_sums[len(rows),](
                source, rows, partials, table.blocks, table.firsts[shard], block=BLOCK, num_warps=WARPS
            )
