"""Shards cut into blocks, so that every program of a kernel works on elements of one layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

#: Elements of a block; blocks lie at multiples of it, so that whole ones are read 16 bytes at a time.
BLOCK = 2048
#: What a row of :attr:`BlockTable.rows` holds.
COLUMNS = 5


class BlockTable:
    """The blocks of several shards side by side.

    A block covers ``shard[start : start + BLOCK]`` with ``start`` a multiple of BLOCK, and only those of its elements
    that belong to one segment; two segments that meet in it have a block each. Padding is in no block.

    Args:
        shards: for each shard its segments ``(start, numel, layer, first)``: the run's place in the shard, its layer,
            counted over all shards, and which of the flattened layer's elements comes first. At most one a layer.
        layers: number of layers of all shards.
        device: where the shards are.

    Attributes:
        segments: as given, by shard.
        rows: for each shard ``(blocks, COLUMNS)`` int64: start, first and last (exclusive) element inside the block,
            layer, and which of the flattened layer's elements the block's element 0 would be (may be negative).
        firsts: for each shard the number of its first block.
        blocks: of all shards together.
        layers: number of layers.
        spans: ``(layers, 2)`` int32, first block and number of blocks of every layer.
    """

    def __init__(
        self, shards: Sequence[Sequence[tuple[int, int, int, int]]], layers: int, device: torch.device
    ) -> None:
        self.segments = [list(segments) for segments in shards]
        flat = torch.tensor([s for segments in shards for s in segments], dtype=torch.long).view(-1, 4)
        start, numel, layer, first = flat.unbind(1)
        begin, end = start // BLOCK, (start + numel + BLOCK - 1) // BLOCK
        counts = end - begin
        firsts = counts.cumsum(0) - counts
        segment = torch.arange(len(flat)).repeat_interleave(counts)
        base = (begin[segment] + torch.arange(len(segment)) - firsts[segment]) * BLOCK
        rows = torch.stack(
            [
                base,
                (start[segment] - base).clamp_(min=0),
                (start[segment] + numel[segment] - base).clamp_(max=BLOCK),
                layer[segment],
                base - start[segment] + first[segment],
            ],
            dim=1,
        ).to(device)
        spans = torch.zeros(layers, 2, dtype=torch.int32)
        spans[layer] = torch.stack([firsts, counts], dim=1).to(torch.int32)
        bounds = [0, *counts.cumsum(0).tolist()]
        ends = [0]
        for segments in shards:
            ends.append(ends[-1] + len(segments))
        self.firsts = [bounds[e] for e in ends[:-1]]
        self.blocks = len(rows)
        self.rows = list(rows.split([bounds[b] - bounds[a] for a, b in itertools.pairwise(ends)]))
        self.layers = layers
        self.spans = spans.to(device)
