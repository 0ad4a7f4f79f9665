"""Blocks and the sums over them: every element of a segment once, padding never."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ds_vrgd.kernels.blocks import BLOCK, BlockTable
from ds_vrgd.kernels.records import Columns, RatioNumbers, ShardCall, Tensors
from ds_vrgd.kernels.update import Launcher, empty_partials, lars_norms, ratio_sums, sum_blocks

Segment = tuple[int, int, int, int]
# Two shards: unaligned runs that meet, gaps, a run of one element, one of a whole block, layers (4 and 6) in neither.
SHARDS: list[list[Segment]] = [
    [(3, 1, 0, 0), (4, 2 * BLOCK + 5, 1, 700), (3 * BLOCK, BLOCK, 2, 0)],
    [(0, 9, 3, 0), (9, BLOCK - 9, 5, 40)],
]
NUMELS = [4 * BLOCK + 7, BLOCK + 1]
LAYERS = 7


def test_every_element_is_in_one_block() -> None:
    table = BlockTable(SHARDS, LAYERS, torch.device("cpu"))
    rows_of = [table.rows[first:end].tolist() for first, end in itertools.pairwise(table.bounds)]
    for shard, (segments, rows, numel) in enumerate(zip(SHARDS, rows_of, NUMELS, strict=True)):
        layers, places = torch.full((numel,), -1), torch.full((numel,), -1)
        for start, low, high, layer, index, of_shard in rows:
            assert of_shard == shard
            assert start % BLOCK == 0
            assert 0 <= low < high <= BLOCK
            run = slice(start + low, start + high)
            assert (layers[run] == -1).all()
            layers[run] = layer
            places[run] = index + torch.arange(low, high)
        for start, count, layer, first in segments:
            assert (layers[start : start + count] == layer).all()
            assert torch.equal(places[start : start + count], first + torch.arange(count))
        assert (layers >= 0).sum() == sum(count for _, count, _, _ in segments)


def test_a_layers_blocks_are_neighbours() -> None:
    table = BlockTable(SHARDS, LAYERS, torch.device("cpu"))
    rows = table.rows
    assert [0, table.blocks] == [table.bounds[0], table.bounds[-1]]
    assert table.blocks == len(rows)
    for layer, (first, count) in enumerate(table.spans.tolist()):
        assert (rows[:, 3] == layer).nonzero().flatten().tolist() == list(range(first, first + count))
    assert table.spans[4].tolist()[1] == table.spans[6].tolist()[1] == 0


def test_no_segments_at_all(device: torch.device) -> None:
    table = BlockTable([[]], 2, device)
    empty = torch.empty(0, device=device)
    launcher = Launcher(table, [ShardCall(Tensors(total=empty, m2=empty))])
    assert launcher.sums(ratio_sums, Columns(), 3).tolist() == [[0.0, 0.0]] * 3


def shard_of(segments: list[Segment], numel: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Total and m2 with NaN in the padding, and elements without gradient, or variance, or too small to be squared."""
    generator = torch.Generator().manual_seed(seed)
    total, m2 = torch.full((numel,), torch.nan), torch.full((numel,), torch.nan)
    for start, count, _, _ in segments:
        total[start : start + count] = torch.randn(count, generator=generator)
        m2[start : start + count] = torch.randn(count, generator=generator).square()
        total[start : start + count : 5] = 0
        m2[start + 1 : start + count : 7] = 0
        total[start + 2 : start + count : 11] *= 1e-20
        m2[start + 2 : start + count : 11] *= 1e-40
        total[start + 3 : start + count : 13] *= 1e-18
        m2[start + 3 : start + count : 13] *= 1e-36
    return total.to(device), m2.to(device)


@pytest.mark.parametrize("parts", [1, 3])
def test_ratio_sums(parts: int, device: torch.device) -> None:
    k, eps = 6, 1e-6
    table = BlockTable(SHARDS, LAYERS, device)
    shards = [
        shard_of(segments, numel, seed, device)
        for seed, (segments, numel) in enumerate(zip(SHARDS, NUMELS, strict=True))
    ]

    numbers = RatioNumbers(float(k), float(parts), eps)
    launcher = Launcher(table, [ShardCall(Tensors(total=total, m2=m2), numbers) for total, m2 in shards])
    partials = empty_partials(table, 3).fill_(torch.nan)
    launcher.launch(ratio_sums, Columns(), partials)
    found = sum_blocks(table, partials)
    expected = torch.zeros(3, LAYERS, dtype=torch.float64)
    for segments, (total, m2) in zip(SHARDS, shards, strict=True):
        for start, count, layer, _ in segments:
            mean = total[start : start + count].cpu().double() / parts
            squares = m2[start : start + count].cpu().double()
            ratio = mean.square() / torch.maximum(squares / k, eps * mean.square()).clamp(min=2.0**-126)
            expected[:, layer] = torch.stack([ratio.sum(), mean.square().sum(), squares.sum()])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=0)
    assert torch.equal(found, launcher.sums(ratio_sums, Columns(), 3)), "two calls differ"


def test_norms_whose_squares_leave_the_range_of_fp32(device: torch.device) -> None:
    """Squared norms by LARS' kernel, of gradients between 1 and 1e-38."""
    table = BlockTable(SHARDS, LAYERS, device)
    calls, expected = [], torch.zeros(LAYERS, dtype=torch.float64)
    for index, (segments, numel) in enumerate(zip(SHARDS, NUMELS, strict=True)):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(index)).abs() + 0.5
        for start, count, layer, _ in segments:
            run = gradient[start : start + count]
            run *= (1.0, 1e-16, 1e-21, 1e-25, 0.0, 1e-38)[layer]
            expected[layer] = run.double().square().sum()
        calls.append(ShardCall(Tensors(torch.ones(numel, device=device), gradient.to(device))))
    sums = Launcher(table, calls).sums(lars_norms, Columns(), 2)
    torch.testing.assert_close(sums[1].cpu(), expected, rtol=1e-6, atol=0)


def test_many_blocks_of_one_layer_sum_in_fp64(device: torch.device) -> None:
    # 1500 blocks are two chunks; ones added to 2**24 in fp32 would be lost
    table = BlockTable([[(0, 1500 * BLOCK, 0, 0)]], 1, device)
    partials = torch.ones(1, 1500, device=device)
    partials[0, 0] = 2.0**24
    assert sum_blocks(table, partials).tolist() == [[2.0**24 + 1499]]
