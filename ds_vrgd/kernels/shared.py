"""What the kernels share: blocks, the gradient of a step with the ratio in front of it, sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ds_vrgd.kernels.blocks import COLUMNS, BlockTable

WARPS = 8
# Blocks of a layer that are summed at once.
CHUNK = 1024

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def block_row(rows, block: tl.constexpr):
    """This program's block: start in the shard, first and last element inside it, layer, index in the layer."""
    row = rows + tl.program_id(0).to(tl.int64) * _COLUMNS
    start = tl.multiple_of(tl.load(row), block)
    return start, tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)


@triton.jit
def raw_ratio(source, offsets, mask):
    """Mean over the chunks, m2, and the raw ratio (equations 2 and 7), with 0/0 = 0."""
    mean = tl.load(source.total + offsets, mask) / source.parts
    m2 = tl.load(source.m2 + offsets, mask)
    square = mean * mean
    variance = tl.maximum(m2 / source.k, square * source.gsnr_eps)
    # The variance is 0 only where the squared mean is.
    return mean, m2, square / tl.where(variance == 0.0, 1.0, variance)


@triton.jit
def normalized_ratio(source, offsets, mask, layer):
    """Raw ratio over its mean in the layer (equation 8), with 0/0 = 0."""
    _, _, raw = raw_ratio(source, offsets, mask)
    mean = tl.load(source.means + layer).to(tl.float32)
    return raw / tl.where(mean == 0.0, 1.0, mean)


@triton.jit
def mixed(x):
    """A 32-bit integer hash ("lowbias32" of C. Wellons' hash-prospector)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def stochastic_bf16(values, index, seed):
    """fp32 values rounded to bf16: up with the probability of the bits that are cut off."""
    noise = mixed(index.to(tl.uint32) ^ seed.to(tl.uint32)) & 0xFFFF
    bits = values.to(tl.uint32, bitcast=True) + noise
    return (bits & 0xFFFF0000).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def averaged(source, ratio, offsets, mask, index, seed, begins: tl.constexpr):
    """Advance the running mean of the ratio; returns it debiased."""
    if begins:  # noqa: SIM108
        before = ratio * source.earlier
    else:
        before = tl.load(source.average + offsets, mask).to(tl.float32)
    average = before * source.beta3 + ratio * source.rest3
    if source.average.dtype.element_ty == tl.bfloat16:
        tl.store(source.average + offsets, stochastic_bf16(average, index, seed), mask)
    else:
        tl.store(source.average + offsets, average, mask)
    return average * source.debias


@triton.jit
def gradient_and_ratio(source, offsets, mask, layer, index, seed, begins: tl.constexpr):
    """The gradient that the base optimizer takes, and the normalised ratio before it is clamped (1 without GSNR)."""
    gradient = tl.load((source.total if source.grad is None else source.grad) + offsets, mask)
    if source.scale is not None:
        gradient *= tl.load(source.scale)
    ratio = tl.full(offsets.shape, 1.0, tl.float32)
    if source.m2 is not None:
        ratio = normalized_ratio(source, offsets, mask, layer)
        # equation 9
        factor = tl.minimum(tl.maximum(ratio, source.gamma), 1.0)
        if source.average is not None:
            factor = averaged(source, factor, offsets, mask, index, seed, begins)
        gradient *= factor
    return gradient, ratio


@triton.jit
def store_sum(partials, column, blocks, first, values, mask):
    """Sum of a block's values, to its place in ``partials[column]``."""
    if mask is not None:
        values = tl.where(mask, values, 0.0)
    tl.store(partials + column * blocks + first + tl.program_id(0), tl.sum(values, 0))


@triton.jit
def store_clamped(source, partials, column, blocks, first, ratio, mask):
    """The number of a block's elements whose ratio gamma raises, and of those that 1 lowers."""
    if source.m2 is not None:
        store_sum(partials, column, blocks, first, (ratio < source.gamma).to(tl.float32), mask)
        store_sum(partials, column + 1, blocks, first, (ratio > 1.0).to(tl.float32), mask)


@triton.jit(do_not_specialize=["blocks", "layers"])
def _sum_blocks(partials, spans, out, blocks, layers, chunk: tl.constexpr):
    layer, column = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(spans + 2 * layer), tl.load(spans + 2 * layer + 1)
    # The order of the sum is fixed: by place in the chunk, then over the chunk.
    places = tl.arange(0, chunk)
    total = tl.zeros([chunk], tl.float64)
    start = count * 0
    while start < count:
        inside = start + places < count
        total += tl.load(partials + column * blocks + first + start + places, inside, other=0.0).to(tl.float64)
        start += chunk
    tl.store(out + column * layers + layer, tl.sum(total, 0))


def empty_partials(table: BlockTable, columns: int) -> Tensor:
    """``(columns, blocks)`` for the kernels to write their sums into."""
    return torch.empty(columns, table.blocks, dtype=torch.float32, device=table.spans.device)


def sum_blocks(table: BlockTable, partials: Tensor) -> Tensor:
    """Sums over each layer's blocks, in a fixed order.

    Args:
        table: of the blocks.
        partials: ``(columns, blocks)`` fp32.

    Returns:
        ``(columns, layers)`` fp64; 0 for layers without a block here.
    """
    columns = len(partials)
    out = torch.empty(columns, table.layers, dtype=torch.float64, device=partials.device)
    with torch.cuda.device_of(out):
        _sum_blocks[table.layers, columns](partials, table.spans, out, table.blocks, table.layers, chunk=CHUNK)
    return out
