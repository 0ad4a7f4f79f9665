"""Chan's formula against two passes over all chunks in float64."""

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments.chan import merge_, moments_of


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


@pytest.mark.parametrize("sizes", [[1, 1], [3, 1, 1], [1, 5], [2, 2, 2, 2], [64, 1, 7]])
def test_merge_equals_two_passes(sizes: list[int]) -> None:
    chunks = normal(sum(sizes), 40)
    mean, m2, count = torch.full((40,), torch.nan), torch.full((40,), torch.nan), 0
    for part in chunks.split(sizes):
        merge_(mean, m2, count, *moments_of(part), len(part))
        count += len(part)
    expected_mean, expected_m2 = two_pass(chunks)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(m2.double(), expected_m2, rtol=1e-5, atol=0)


def test_a_single_chunk_has_no_squares() -> None:
    chunks = normal(4, 10)
    mean, m2 = torch.empty(10), torch.empty(10)
    for count, chunk in enumerate(chunks):
        merge_(mean, m2, count, chunk, 0.0, 1)
    torch.testing.assert_close(m2.double(), two_pass(chunks)[1], rtol=1e-5, atol=0)


def test_a_small_variance_around_a_large_mean_survives() -> None:
    # A mean of 1e4 and deviations of 0.01: E[g^2] - E[g]^2 in fp32 rounds 1e8 to a multiple of 8; the variance is 1e-4.
    chunks = 1e4 + 0.01 * normal(32, 100)
    expected = two_pass(chunks)[1]
    naive = chunks.square().sum(0) - 32 * chunks.mean(0).square()
    assert ((naive - expected).abs() > 1e4 * expected).any()  # the case is one where the naive formula fails
    at_once = moments_of(chunks)[1]
    mean, m2 = torch.empty(100), torch.empty(100)
    for count, part in enumerate(chunks.split(4)):
        merge_(mean, m2, 4 * count, *moments_of(part), 4)
    # Numbers near 1e4 are 1e-3 apart; a mean that is some of these off adds k times its squared error, here below 10 %.
    for found in (at_once, m2):
        torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0)


def test_count_zero_overwrites_what_an_overflow_left() -> None:
    mean, m2 = torch.tensor([torch.inf, torch.nan]), torch.tensor([torch.nan, -torch.inf])
    merge_(mean, m2, 0, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), 5)
    assert mean.tolist() == [1.0, 2.0]
    assert m2.tolist() == [3.0, 4.0]
    merge_(mean.fill_(torch.inf), m2.fill_(torch.nan), 0, torch.tensor([1.0, 2.0]), 0.0, 1)
    assert mean.tolist() == [1.0, 2.0]
    assert m2.tolist() == [0.0, 0.0]
