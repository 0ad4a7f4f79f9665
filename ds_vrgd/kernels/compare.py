"""The ranks' gradients side by side, in one reading of what an exchange brought (``ds_vrgd.moments.compare``)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, COLUMNS, BlockTable
from ds_vrgd.kernels.update import empty_partials, sum_blocks

WARPS = 4
#: Columns that a program has at once, by the rows of its tile: the ranks, and their mean. With fewer rows than
#: :data:`PRODUCT` the products are summed one by one, since the matrix product takes no fewer.
TILES = {4: 256, 8: 64}
TILE = 64
PRODUCT = 16

_COLUMNS, _PRODUCT = tl.constexpr(COLUMNS), tl.constexpr(PRODUCT)


@triton.jit
def _largest(values, index, best, where):
    """Return the largest values of the rows so far, and the indices of their elements."""
    found, at = tl.max(values, 1, return_indices=True, return_indices_tie_break_left=True)
    return tl.maximum(found, best), tl.where(found > best, index + at, where)


@triton.jit
def _store_largest(peak, values, where, row, ranks):
    bits = values.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.atomic_max(peak + row, bits | (where & 0xFFFFFFFF), mask=row < ranks)


@triton.jit(do_not_specialize=["blocks", "row_stride"])
def _compare(
    rows, row_stride, table, layers, partials, blocks, peak, largest, least_share,
    ranks: tl.constexpr, height: tl.constexpr, sketch: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    entry = table + number.to(tl.int64) * _COLUMNS
    start, low, high = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    layer, index = tl.load(layers + tl.load(entry + 3)), tl.load(entry + 4)
    row, column = tl.arange(0, height), tl.arange(0, tile)
    is_rank, is_mean = (row < ranks)[:, None], (row == ranks)[:, None]
    if height < _PRODUCT:  # noqa: SIM108, a kernel knows no such expression of two shapes
        gram = tl.zeros([height, height, tile], tl.float32)
    else:
        gram = tl.zeros([height, height], tl.float32)
    signed = tl.zeros([height, tile], tl.float32)
    squares, bad = tl.zeros([height], tl.float32), tl.zeros([height], tl.float32)
    far, far_at = tl.zeros([height], tl.float32), tl.zeros([height], tl.int64)
    top, top_at = tl.zeros([height], tl.float32), tl.zeros([height], tl.int64)
    for offset in range(0, block, tile):
        inside = offset + column
        mask = is_rank & ((inside >= low) & (inside < high))[None, :]
        places = row.to(tl.int64)[:, None] * row_stride + (start + inside)[None, :]
        values = tl.load(rows + places, mask, other=0.0).to(tl.float32)
        is_bad = (tl.abs(values) <= largest) == 0  # also where it is no number
        bad += tl.sum(is_bad.to(tl.float32), 1)
        values = tl.where(is_bad, 0.0, values)
        squares += tl.sum(values * values, 1)
        mean = tl.sum(values, 0) / ranks
        deviations = tl.where(is_rank, values - mean[None, :], 0.0)
        joined = tl.where(is_mean, mean[None, :], deviations)
        if height < _PRODUCT:
            gram += joined[:, None, :] * joined[None, :, :]
        else:
            gram += tl.dot(joined, tl.trans(joined), input_precision="ieee")
        hashed = ((index + inside) >> 4).to(tl.uint32)
        hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D
        negative = ((hashed ^ (hashed >> 15)) & 1) == 1
        signed += tl.where(negative[None, :], -deviations, deviations)
        square = deviations * deviations
        top, top_at = _largest(square, index + offset, top, top_at)
        if ranks > 2:
            own = square * (ranks / (ranks - 1.0))
            everybody = tl.sum(square, 0)
            others = tl.maximum(everybody[None, :] - own, (everybody * least_share)[None, :])
            ratio = tl.where(others > 0.0, own * (ranks - 2.0) / others, 0.0)
            far, far_at = _largest(ratio, index + offset, far, far_at)
    own_peak = peak + layer * 2 * ranks
    _store_largest(own_peak, far, far_at, row, ranks)
    _store_largest(own_peak + ranks, top, top_at, row, ranks)
    if height < _PRODUCT:
        gram = tl.sum(gram, 2)
    out, wide = partials + number, ranks + 1
    places = row[:, None] * wide + row[None, :]
    tl.store(out + places.to(tl.int64) * blocks, gram.to(tl.float64), (row < wide)[:, None] & (row < wide)[None, :])
    out += tl.cast(wide * wide, tl.int64) * blocks
    tl.store(out + row.to(tl.int64) * blocks, squares.to(tl.float64), row < ranks)
    out += tl.cast(ranks, tl.int64) * blocks
    tl.store(out + row.to(tl.int64) * blocks, bad.to(tl.float64), row < ranks)
    out += tl.cast(ranks, tl.int64) * blocks
    summed = tl.sum(tl.reshape(signed, [height, tile // sketch, sketch]), 1)
    # The element 0 of the block need not be in the first number of the sketch.
    number_of = ((index + block + tl.arange(0, sketch)) % sketch)[None, :]
    tl.store(out + (row[:, None] * sketch + number_of) * blocks, summed.to(tl.float64), is_rank)


class Columns:
    """Which columns of a buffer belong to which layer, for the kernel.

    Args:
        runs: ``(start, elements, layer, index of the first element in the flattened layer)``; a layer may have several.
        device: where the buffer is.
    """

    def __init__(self, runs: Any, device: torch.device) -> None:
        numbered = [[(start, numel, place, first) for place, (start, numel, _, first) in enumerate(sorted(runs))]]
        self.layers = torch.tensor([layer for _, _, layer, _ in sorted(runs)], dtype=torch.long, device=device)
        self.table = BlockTable(numbered, len(runs), device)


def compare_rows(
    rows: Tensor, columns: Columns, sums: Tensor, peak: Tensor, sketch: int, largest: float, least_share: float
) -> None:
    """:func:`ds_vrgd.moments.compare.add_rows_` on CUDA, in fp32 in a block, and in fp64 over the blocks.

    Args:
        rows: ``(k, n)`` in fp32, bf16 or fp16; elements of a row are neighbours, rows may be any stride apart.
        columns: which of them belong to which layer.
        sums: ``(L, columns of the sums)`` fp64, added to.
        peak: ``(L, 2, k)`` int64, updated; contiguous.
        sketch: numbers in a rank's sketch; a divisor of every tile.
        largest, least_share: as there.
    """
    if not columns.table.blocks:
        return
    ranks = len(rows)
    height = max(min(TILES), triton.next_power_of_2(ranks + 1))
    partials = empty_partials(columns.table, sums.shape[1])
    with torch.cuda.device_of(rows):
        _compare[columns.table.blocks,](
            rows, rows.stride(0), columns.table.rows, columns.layers, partials, columns.table.blocks, peak, largest,
            least_share, ranks=ranks, height=height, sketch=sketch, block=BLOCK,
            tile=TILES.get(height, TILE), num_warps=WARPS,
        )  # fmt: skip
    sums.index_add_(0, columns.layers, sum_blocks(columns.table, partials).T)
