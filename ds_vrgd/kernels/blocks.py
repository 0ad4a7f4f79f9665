"""Shards cut into blocks, so that every program of a kernel works on elements of one layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

#: Elements of a block; blocks lie at multiples of it, so that whole ones are read 16 bytes at a time.
BLOCK = 2048
#: Numbers in a row of :attr:`BlockTable.rows`.
COLUMNS = 6
#: Where the squares of a run of values sum to less, some may have left fp32's range: they are summed anew, of values
#: that were multiplied by :data:`GROWTH`.
SMALL_SQUARES, GROWTH = 2.0**-100, 2.0**64


class BlockTable:
    """The blocks of several shards.

    A block covers ``shard[start : start + BLOCK]`` with ``start`` a multiple of BLOCK, and only those of its elements
    that belong to one segment; two segments that share a block's elements have a block each. Padding is in no block.

    Args:
        shards: for each shard its segments ``(start, numel, layer, first)``: the run's offset in the shard, its layer,
            counted over all shards, and the index of its first element in the flattened layer. At most one per layer.
        layers: number of layers of all shards.
        device: where the shards are.

    Attributes:
        rows: ``(blocks, COLUMNS)`` int64: start, first and last (exclusive) element inside the block, layer, the index
            in the flattened layer that the block's element 0 would have (may be negative), and the shard.
        bounds: the number of the first block of each shard, and that of all blocks.
        blocks, layers: their numbers, over all shards.
        spans: ``(layers, 2)`` int32, first block and number of blocks of every layer.
    """

    def __init__(
        self, shards: Sequence[Sequence[tuple[int, int, int, int]]], layers: int, device: torch.device
    ) -> None:
        flat = torch.tensor([segment for segments in shards for segment in segments], dtype=torch.long).view(-1, 4)
        start, numel, layer, first = flat.unbind(1)
        begin, end = start // BLOCK, (start + numel + BLOCK - 1) // BLOCK
        counts = end - begin
        firsts = counts.cumsum(0) - counts
        segment = torch.arange(len(flat)).repeat_interleave(counts)
        base = (begin[segment] + torch.arange(len(segment)) - firsts[segment]) * BLOCK
        offset = base - start[segment]
        low, high = (-offset).clamp_(min=0), (numel[segment] - offset).clamp_(max=BLOCK)
        shard = torch.arange(len(shards)).repeat_interleave(torch.tensor([*map(len, shards)], dtype=torch.long))
        rows = torch.stack([base, low, high, layer[segment], offset + first[segment], shard[segment]], dim=1)
        spans = torch.zeros(layers, 2, dtype=torch.int32)
        spans[layer] = torch.stack([firsts, counts], dim=1).to(torch.int32)
        ends = [0, *counts.cumsum(0).tolist()]
        self.bounds = [ends[segments] for segments in itertools.accumulate(map(len, shards), initial=0)]
        self.blocks = len(rows)
        self.rows = rows.to(device)
        self.layers = layers
        self.spans = spans.to(device)
