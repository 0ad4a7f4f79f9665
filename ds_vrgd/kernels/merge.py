"""Merging the chunk gradients that an exchange brought into the moments, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
WARPS = 8
# Rows whose loads are issued together.
UNROLL = 8


@triton.jit
def _merge_block(
    received, total, m2, out, columns, row_stride, mask, parts, divisor,
    rows: tl.constexpr, unroll: tl.constexpr, first: tl.constexpr,
):  # fmt: skip
    sum_of_rows = tl.zeros(columns.shape, tl.float32)
    for row in tl.range(0, rows, loop_unroll_factor=unroll):
        sum_of_rows += tl.load(received + row * row_stride + columns, mask).to(tl.float32)
    mean = sum_of_rows / rows
    if out is not None:
        tl.store(out + columns, sum_of_rows / divisor, mask)
    if first:
        tl.store(total + columns, mean, mask)
    else:
        before = tl.load(total + columns, mask)
        tl.store(total + columns, before + mean, mask)
    if m2 is not None:
        squares = tl.zeros(columns.shape, tl.float32)
        # The second reading finds the rows in the cache.
        for row in tl.range(0, rows, loop_unroll_factor=unroll):
            deviation = tl.load(received + row * row_stride + columns, mask).to(tl.float32) - mean
            squares += deviation * deviation
        if not first:
            delta = mean - before / parts
            squares = tl.load(m2 + columns, mask) + (squares + delta * delta * (rows * (parts / (parts + 1.0))))
        tl.store(m2 + columns, squares, mask)


@triton.jit
def _merge(
    received, total, m2, out, numel, row_stride, parts, divisor,
    rows: tl.constexpr, unroll: tl.constexpr, first: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * block
    columns = start + tl.arange(0, block)
    # Without a mask the loads and stores are 16 bytes wide also where numel is odd.
    if start + block <= numel:
        _merge_block(received, total, m2, out, columns, row_stride, None, parts, divisor, rows, unroll, first)
    else:
        mask = columns < numel
        _merge_block(received, total, m2, out, columns, row_stride, mask, parts, divisor, rows, unroll, first)


def merge_chunks(
    received: Tensor, total: Tensor, m2: Tensor, parts: int, out: Tensor | None = None, divisor: float = 1.0
) -> None:
    """:func:`ds_vrgd.moments.chan.merge_chunks_` on CUDA.

    Args:
        received: ``(k, n)`` in fp32, bf16 or fp16; elements of a row are neighbours, rows may be any stride apart.
        total, m2: ``(n,)`` fp32, contiguous, at any offset; ``m2`` may be without elements.
        parts, divisor: as there.
        out: as there; fp32, contiguous.
    """
    rows, numel = received.shape
    if numel == 0:
        return
    with torch.cuda.device_of(total):
        _merge[triton.cdiv(numel, BLOCK),](
            received, total, m2 if m2.numel() else None, out, numel, received.stride(0), float(parts), divisor,
            rows=rows, unroll=min(rows, UNROLL), first=parts == 0, block=BLOCK, num_warps=WARPS,
        )  # fmt: skip
