"""Chan's formula against two passes over all chunks in float64."""

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments.chan import merge_chunk_of_each_, merge_chunks_, merge_zeros_, moments_of


def two_pass(chunks: Tensor) -> tuple[Tensor, Tensor]:
    wide = chunks.double()
    mean = wide.mean(0)
    return mean, ((wide - mean) ** 2).sum(0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_moments_of(k: int, dtype: torch.dtype) -> None:
    chunks = normal(k, 50).to(dtype)
    mean, m2 = moments_of(chunks)
    assert mean.dtype == m2.dtype == torch.float32
    expected_mean, expected_m2 = two_pass(chunks)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(m2.double(), expected_m2, rtol=1e-5, atol=1e-9)


def test_moments_of_leaves_the_chunks_alone() -> None:
    chunks = normal(3, 4)
    before = chunks.clone()
    moments_of(chunks)
    assert torch.equal(chunks, before)


def merged_one_by_one(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum and centred squares by both functions that merge whole gradients; a row of zeros never came."""
    total, m2 = torch.full((chunks.shape[1],), torch.nan), torch.full((chunks.shape[1],), torch.nan)
    for count, chunk in enumerate(chunks):
        if chunk.any():
            merge_chunk_of_each_([total[:3], total[3:]], [m2[:3], m2[3:]], count, [chunk[:3], chunk[3:]])
        else:
            merge_zeros_(total, m2, count, 1)
    return total, m2


@pytest.mark.parametrize("rows", [2, 3, 7, 64])
@pytest.mark.parametrize("zeros", [(), (0,), (1,), (0, 1)])
def test_merge_one_by_one_equals_two_passes(rows: int, zeros: tuple[int, ...]) -> None:
    chunks = normal(rows, 40)
    chunks[list(zeros)] = 0.0
    total, m2 = merged_one_by_one(chunks)
    expected_mean, expected_m2 = two_pass(chunks)
    torch.testing.assert_close(total.double() / rows, expected_mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(m2.double(), expected_m2, rtol=1e-5, atol=0)


@pytest.mark.parametrize("zeros", [1, 5])
def test_many_zeros_at_once(zeros: int) -> None:
    chunks = torch.cat([normal(3, 10), torch.zeros(zeros, 10)])
    total, m2 = merged_one_by_one(chunks[:3])
    merge_zeros_(total, m2, 3, zeros)
    torch.testing.assert_close(m2.double(), two_pass(chunks)[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("pairs", [1, 3])
def test_chunks_that_cancel_leave_their_sum_and_nothing_else(pairs: int) -> None:
    # In fp32 every partial sum here is exact; a running mean would leave 5e-8 of the largest chunk.
    large = normal(pairs, 30).bfloat16().float()
    small = normal(30, seed=1).bfloat16().float() * 2**-14
    chunks = torch.stack([row for pair in large for row in (pair, -pair)] + [small])
    total, m2 = merged_one_by_one(chunks)
    assert torch.equal(total, small)
    torch.testing.assert_close(m2.double(), two_pass(chunks)[1], rtol=1e-5, atol=0)


def test_a_small_variance_around_a_large_mean_survives() -> None:
    # A mean of 1e4 and deviations of 0.01: E[g^2] - E[g]^2 in fp32 rounds 1e8 to a multiple of 8; the variance is 1e-4.
    chunks = 1e4 + 0.01 * normal(32, 100)
    expected = two_pass(chunks)[1]
    naive = chunks.square().sum(0) - 32 * chunks.mean(0).square()
    assert ((naive - expected).abs() > 1e4 * expected).any()  # the case is one where the naive formula fails
    at_once = moments_of(chunks)[1]
    total, m2 = torch.empty(100), torch.empty(100)
    for parts, micro_batch in enumerate(chunks.split(4)):
        merge_chunks_(micro_batch, total, m2, parts)
    one_by_one = merged_one_by_one(chunks)[1]
    # Numbers near 1e4 are 1e-3 apart; a mean that is some of these off adds k times its squared error, here below 10 %.
    for found in (at_once, m2, one_by_one):
        torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0)


def test_count_zero_overwrites_what_an_overflow_left() -> None:
    total, m2 = torch.tensor([torch.inf, torch.nan]), torch.tensor([torch.nan, -torch.inf])
    merge_chunk_of_each_([total], [m2], 0, [torch.tensor([1.0, 2.0])])
    assert total.tolist() == [1.0, 2.0]
    assert m2.tolist() == [0.0, 0.0]
    merge_zeros_(total.fill_(torch.inf), m2.fill_(torch.nan), 0, 3)
    assert total.tolist() == m2.tolist() == [0.0, 0.0]
