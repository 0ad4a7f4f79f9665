"""The ranks' gradients side by side, in one reading of what an exchange brought (``ds_vrgd.moments.compare``)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, COLUMNS, BlockTable
from ds_vrgd.kernels.update import empty_partials, sum_blocks

WARPS = 1


def tile_of(ranks: int) -> int:
    """Return how many columns a program has at once: each needs a register for every product of two ranks."""
    return 64 if ranks < 8 else 32


_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def _with(values, value):
    """Return a tuple with one more value: a number of each rank, which a thread keeps in registers of its own."""
    return values + (value,)  # noqa: RUF005, a kernel cannot unpack


@triton.jit
def _repeated(value, times: tl.constexpr):
    found = ()
    for _ in tl.static_range(times):
        found = _with(found, value)
    return found


@triton.jit
def _store_largest(peak, values, where, index):
    """Take the largest of a rank's values, and the index of its element, into ``peak``."""
    best, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    place = tl.sum(tl.where(tl.arange(0, values.shape[0]) == at, where, 0), 0)
    bits = best.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.atomic_max(peak, bits | ((index + place) & 0xFFFFFFFF))


@triton.jit(do_not_specialize=["blocks", "row_stride"])
def _compare(
    rows, row_stride, table, layers, partials, blocks, peak, largest, least_share,
    ranks: tl.constexpr, sketch: tl.constexpr, block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    entry = table + number.to(tl.int64) * _COLUMNS
    start, low, high = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    layer, index = tl.load(layers + tl.load(entry + 3)), tl.load(entry + 4)
    column = tl.arange(0, tile)
    zero, nowhere = tl.zeros([tile], tl.float32), tl.zeros([tile], tl.int32)
    products = _repeated(zero, (ranks + 1) * (ranks + 2) // 2)
    squares, bad, signed = _repeated(zero, ranks), _repeated(zero, ranks), _repeated(zero, ranks)
    far, far_at, top, top_at = (
        _repeated(zero, ranks), _repeated(nowhere, ranks), _repeated(zero, ranks), _repeated(nowhere, ranks),
    )  # fmt: skip
    for offset in range(0, block, tile):
        inside = offset + column
        mask = (inside >= low) & (inside < high)
        values, mean, new_bad, new_squares = (), zero, (), ()
        for rank in tl.static_range(ranks):
            at = rows + tl.cast(rank, tl.int64) * row_stride + start + inside
            value = tl.load(at, mask, other=0.0).to(tl.float32)
            is_bad = (tl.abs(value) <= largest) == 0  # also where it is no number
            value = tl.where(is_bad, 0.0, value)
            new_bad = _with(new_bad, bad[rank] + is_bad.to(tl.float32))
            new_squares = _with(new_squares, squares[rank] + value * value)
            values, mean = _with(values, value), mean + value
        bad, squares, mean = new_bad, new_squares, mean / ranks
        joined, everybody = (), zero
        for rank in tl.static_range(ranks):
            deviation = values[rank] - mean
            joined, everybody = _with(joined, deviation), everybody + deviation * deviation
        joined = _with(joined, mean)
        new_products = ()
        for row in tl.static_range(ranks + 1):
            for other in tl.static_range(row + 1):
                new_products = _with(new_products, products[row * (row + 1) // 2 + other] + joined[row] * joined[other])
        products = new_products
        hashed = ((index + inside) >> 4).to(tl.uint32)
        hashed = (hashed ^ (hashed >> 16)) * 0x7FEB352D
        negative = ((hashed ^ (hashed >> 15)) & 1) == 1
        # What a rank has of all ranks' squares orders as its deviation in the others' does, for one division a column.
        scale = tl.where(everybody > 0.0, (ranks / (ranks - 1.0)) / everybody, 0.0)
        new_signed, new_top, new_top_at, new_far, new_far_at = (), (), (), (), ()
        for rank in tl.static_range(ranks):
            new_signed = _with(new_signed, signed[rank] + tl.where(negative, -joined[rank], joined[rank]))
            square = joined[rank] * joined[rank]
            new_top_at = _with(new_top_at, tl.where(square > top[rank], inside, top_at[rank]))
            new_top = _with(new_top, tl.maximum(square, top[rank]))
            if ranks > 2:
                share = square * scale
                new_far_at = _with(new_far_at, tl.where(share > far[rank], inside, far_at[rank]))
                new_far = _with(new_far, tl.maximum(share, far[rank]))
        signed, top, top_at = new_signed, new_top, new_top_at
        if ranks > 2:
            far, far_at = new_far, new_far_at
    own_peak, out, wide = peak + layer * 2 * ranks, partials + number, ranks + 1
    # The element 0 of the block need not be in the first number of the sketch.
    number_of = (index + block + tl.arange(0, sketch)) % sketch
    for row in tl.static_range(ranks + 1):
        for other in tl.static_range(row + 1):
            product = tl.sum(products[row * (row + 1) // 2 + other], 0)
            tl.store(out + tl.cast(row * wide + other, tl.int64) * blocks, product)
            tl.store(out + tl.cast(other * wide + row, tl.int64) * blocks, product)
    out += tl.cast(wide * wide, tl.int64) * blocks
    for rank in tl.static_range(ranks):
        if ranks > 2:
            ratio = far[rank] * (ranks - 2.0) / tl.maximum(1.0 - far[rank], least_share)
            _store_largest(own_peak + rank, ratio, far_at[rank], index)
        _store_largest(own_peak + ranks + rank, top[rank], top_at[rank], index)
        tl.store(out + tl.cast(rank, tl.int64) * blocks, tl.sum(squares[rank], 0))
        tl.store(out + tl.cast(ranks + rank, tl.int64) * blocks, tl.sum(bad[rank], 0))
        summed = tl.sum(tl.reshape(signed[rank], [tile // sketch, sketch]), 0)
        tl.store(out + (2 * ranks + rank * sketch + number_of) * blocks, summed)


class Columns:
    """The columns of a buffer by layer, for the kernel: :data:`ds_vrgd.moments.compare.Run`, several for a layer."""

    def __init__(self, runs: Any, device: torch.device) -> None:
        runs = sorted(runs)
        numbered = [[(start, numel, place, first) for place, (start, numel, _, first) in enumerate(runs)]]
        self.layers = torch.tensor([layer for _, _, layer, _ in runs], dtype=torch.long, device=device)
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
    partials = empty_partials(columns.table, sums.shape[1])
    with torch.cuda.device_of(rows):
        _compare[columns.table.blocks,](
            rows, rows.stride(0), columns.table.rows, columns.layers, partials, columns.table.blocks, peak, largest,
            least_share, ranks=ranks, sketch=sketch, block=BLOCK, tile=tile_of(ranks), num_warps=WARPS,
        )  # fmt: skip
    sums.index_add_(0, columns.layers, sum_blocks(columns.table, partials).T)
