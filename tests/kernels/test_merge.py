"""Merging received chunks: the kernel and its eager twin, against two passes over all chunks in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_vrgd.kernels.merge import merge_chunks
from ds_vrgd.moments.chan import merge_chunks_

Merge = Callable[..., None]
WIRES = [torch.float32, torch.bfloat16, torch.float16]
both = pytest.mark.parametrize("merge", [merge_chunks, merge_chunks_], ids=["kernel", "eager"])


def micro_batches(count: int, k: int, n: int, dtype: torch.dtype, device: torch.device, mean: float = 0.0) -> Tensor:
    chunks = mean + torch.randn(count, k, n, generator=torch.Generator().manual_seed(k + n))
    chunks[:, :, ::5] = 0  # no gradient there
    return chunks.to(dtype).to(device)


def buffers(n: int, offset: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Views into larger buffers, with what an overflow leaves behind."""
    total, m2 = torch.full((n + 8,), torch.nan, device=device), torch.full((n + 8,), torch.inf, device=device)
    return total[offset : offset + n], m2[offset : offset + n]


@both
@pytest.mark.parametrize("dtype", WIRES)
@pytest.mark.parametrize("k", [1, 2, 3, 9, 40])
def test_equals_two_passes(merge: Merge, k: int, dtype: torch.dtype, device: torch.device) -> None:
    chunks = micro_batches(3, k, 2500, dtype, device)
    total, m2 = buffers(2500, 3, device)
    for parts, received in enumerate(chunks):
        merge(received, total, m2, parts)
    wide = chunks.flatten(0, 1).double()
    torch.testing.assert_close(total.double() / 3, wide.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(m2.double(), (wide - wide.mean(0)).square().sum(0), rtol=1e-5, atol=1e-9)


@both
@pytest.mark.parametrize("n", [1, 7, 2047, 2048, 4101])
def test_only_its_own_elements_are_written(merge: Merge, n: int, device: torch.device) -> None:
    chunks = micro_batches(1, 3, n, torch.bfloat16, device)
    for offset in (0, 1, 4):
        total, m2 = buffers(n, offset, device)
        merge(chunks[0], total, m2, 0)
        assert torch.isfinite(total).all()
        assert torch.isfinite(m2).all()
        whole = torch.as_strided(total, (n + 8,), (1,), 0)
        assert whole.isnan().sum() == 8


@both
def test_rows_with_a_stride(merge: Merge, device: torch.device) -> None:
    chunks = micro_batches(1, 4, 30, torch.float32, device)[0]
    strided = torch.full((4, 64), torch.nan, device=device)
    strided[:, 5:35] = chunks
    expected, found = buffers(30, 0, device), buffers(30, 0, device)
    merge(chunks, *expected, 0)
    merge(strided[:, 5:35], *found, 0)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@both
def test_a_small_variance_around_a_large_mean_survives(merge: Merge, device: torch.device) -> None:
    chunks = micro_batches(4, 8, 100, torch.float32, device) * 0.01 + 1e4
    total, m2 = buffers(100, 0, device)
    for parts, received in enumerate(chunks):
        merge(received, total, m2, parts)
    wide = chunks.flatten(0, 1).double()
    # numbers near 1e4 are 1e-3 apart; a mean that is some of these off adds k times its squared error
    torch.testing.assert_close(m2.double(), (wide - wide.mean(0)).square().sum(0), rtol=0.1, atol=1e-4)


@both
def test_no_elements(merge: Merge, device: torch.device) -> None:
    total, m2 = buffers(0, 0, device)
    merge(torch.empty(2, 0, device=device), total, m2, 0)


@both
def test_two_calls_are_bitwise_equal(merge: Merge, device: torch.device) -> None:
    chunks = micro_batches(2, 5, 3000, torch.bfloat16, device)
    results = []
    for _ in range(2):
        total, m2 = buffers(3000, 2, device)
        for parts, received in enumerate(chunks):
            merge(received, total, m2, parts)
        results.append((total, m2))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_fp64_chunks_stay_fp64() -> None:
    chunks = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total, m2 = torch.empty(50, dtype=torch.float64), torch.empty(50, dtype=torch.float64)
    for parts, received in enumerate(chunks):
        merge_chunks_(received, total, m2, parts)
    flat = chunks.flatten(0, 1)
    torch.testing.assert_close(total / 2, flat.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(m2, (flat - flat.mean(0)).square().sum(0), rtol=1e-12, atol=0)


@both
@pytest.mark.parametrize("parts", [0, 1])
def test_the_sum_over_a_divisor_comes_along(merge: Merge, parts: int, device: torch.device) -> None:
    chunks = micro_batches(1, 3, 3001, torch.bfloat16, device)[0]
    alone, total, m2, out = (torch.ones(3001, device=device) for _ in range(4))
    merge(chunks, alone, m2.clone(), parts)
    merge(chunks, total, m2, parts, out, 2.0)
    assert torch.equal(total, alone)
    torch.testing.assert_close(out, chunks.float().sum(0) / 2.0, rtol=1e-6, atol=1e-7)
