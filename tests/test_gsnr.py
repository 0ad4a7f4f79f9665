"""GSNR on tensors, against the dense float64 oracle and arithmetic done by hand."""

import itertools

import pytest
import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.doctor import reference
from ds_vrgd.moments.chan import moments_of

EPS = 1e-6


def random_chunks(k: int, *shape: int, seed: int = 0) -> Tensor:
    """Chunk gradients with means and deviations of many sizes; the second row never has a gradient."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(*shape, generator=generator)
    deviation = torch.randn(*shape, generator=generator).exp()
    chunks = mean + deviation * torch.randn(k, *shape, generator=generator)
    chunks[:, 1] = 0
    return chunks


def raw(chunks: Tensor, gsnr_eps: float = EPS) -> Tensor:
    mean, m2 = moments_of(chunks.flatten(1))
    return gsnr.raw_ratio(mean, m2, len(chunks), gsnr_eps).view(chunks.shape[1:])


def ratio(chunks: Tensor, gamma: float, gsnr_eps: float = EPS) -> Tensor:
    r = raw(chunks, gsnr_eps)
    return gsnr.clamped_ratio(gsnr.normalized_ratio(r, r.double().mean().to(r.dtype)), gamma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [2, 3, 64])
@pytest.mark.parametrize("gamma", [0.04, 0.1, 0.9])
def test_equals_the_reference(k: int, dtype: torch.dtype, gamma: float) -> None:
    # The reference gets the very same rounded chunks. What is left is fp32 arithmetic; where the chunks nearly cancel,
    # r is small, and so is the error of the mean beside the deviation.
    chunks = random_chunks(k, 23, 7).to(dtype)
    torch.testing.assert_close(raw(chunks).double(), reference.raw_ratio(list(chunks), EPS), rtol=1e-5, atol=1e-6)
    expected = reference.gsnr_ratio(list(chunks), gamma, EPS)
    torch.testing.assert_close(ratio(chunks, gamma).double(), expected, rtol=1e-5, atol=1e-6)


def test_fp64_chunks_stay_fp64() -> None:
    chunks = random_chunks(5, 6, 3).double()
    assert raw(chunks).dtype == torch.float64
    torch.testing.assert_close(ratio(chunks, 0.1), reference.gsnr_ratio(list(chunks), 0.1, EPS), rtol=1e-12, atol=0)


def test_by_hand() -> None:
    # two chunks: 1, 3 has mean 2, variance 1, ratio 4; 3, -1 has mean 1, variance 4, ratio 1/4; the mean ratio is 17/8
    mean, m2 = torch.tensor([2.0, 1.0]), torch.tensor([2.0, 8.0])
    r = gsnr.raw_ratio(mean, m2, 2, EPS)
    assert r.tolist() == [4.0, 0.25]
    assert mean.tolist() == [2.0, 1.0]
    assert m2.tolist() == [2.0, 8.0]  # the moments are left as they were
    normalized = gsnr.normalized_ratio(r, torch.tensor([17 / 8]))
    torch.testing.assert_close(normalized, torch.tensor([32 / 17, 2 / 17]))
    torch.testing.assert_close(gsnr.clamped_ratio(normalized, 0.2), torch.tensor([1.0, 0.2]))


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_one_go_it_is_the_same_ratio(parts: int, dtype: torch.dtype) -> None:
    mean, m2 = moments_of(random_chunks(5, 6, 3).to(dtype).flatten(1))
    r = gsnr.raw_ratio(mean, m2, 5, EPS)
    torch.testing.assert_close(gsnr.raw_ratio(mean * parts, m2, 5, EPS, parts), r)
    sums = gsnr.ratio_sums(mean * parts, m2, 5, EPS, parts)
    torch.testing.assert_close(torch.stack(sums), torch.stack([r.sum(), (mean * parts).square().sum(), m2.sum()]))
    memory = torch.empty_like(mean), torch.empty_like(mean)
    for layer_mean in (float(r.mean()), r.mean(), 0.0, float("inf")):
        found = gsnr.ratio_of_layer(mean * parts, m2, 5, EPS, parts, layer_mean, memory)
        if layer_mean:
            torch.testing.assert_close(found, gsnr.normalized_ratio(r.clone(), layer_mean))
        assert found.data_ptr() == memory[0].data_ptr()


def test_zero_over_zero_is_zero() -> None:
    # no gradient anywhere; a zero mean with a variance; and a mean with a variance
    r = gsnr.raw_ratio(torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.0, 2.0, 2.0]), 2, EPS)
    assert r.tolist() == [0.0, 0.0, 4.0]


def test_a_layer_without_gradient_gets_gamma() -> None:
    r = gsnr.raw_ratio(torch.zeros(3), torch.zeros(3), 4, EPS)
    normalized = gsnr.normalized_ratio(r, torch.zeros(1))
    assert normalized.tolist() == [0.0, 0.0, 0.0]
    assert gsnr.clamped_ratio(normalized, 0.25).tolist() == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("gsnr_eps", [2.0**-20, 2.0**-7])
def test_the_cap_is_one_over_eps(gsnr_eps: float) -> None:
    r = gsnr.raw_ratio(torch.tensor([5.0, -0.5, 1e-12]), torch.tensor([0.0, 0.0, 1e-30]), 3, gsnr_eps)
    torch.testing.assert_close(r, torch.full((3,), 1 / gsnr_eps), rtol=1e-6, atol=0)


@pytest.mark.parametrize("power", [-24, -4, 4, 16])
def test_a_loss_scale_changes_no_bit(power: int) -> None:
    # powers of two only move exponents, as long as nothing underflows
    chunks = random_chunks(9, 31, 5)
    assert torch.equal(raw(chunks * 2.0**power), raw(chunks))
    assert torch.equal(ratio(chunks * 2.0**power, 0.1), ratio(chunks, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unused_embedding_rows_get_gamma(dtype: torch.dtype) -> None:
    # phase 1 of BERT never reaches positions 129-512
    chunks = random_chunks(8, 512, 4).to(dtype)
    chunks[:, 128:] = 0
    r = ratio(chunks, 0.1)
    assert torch.isfinite(r).all()
    assert (r[128:] == torch.tensor(0.1)).all()
    torch.testing.assert_close(r.double(), reference.gsnr_ratio(list(chunks), 0.1, EPS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-15, 1e-18, 1.1e-19, 1e-20, 1e-25])
def test_elements_too_small_to_be_squared_leave_their_layer_alone(size: float, dtype: torch.dtype) -> None:
    chunks = random_chunks(6, 23, 7).to(dtype)
    chunks[:, ::2] *= size
    torch.testing.assert_close(raw(chunks).double(), reference.raw_ratio(list(chunks), EPS), rtol=1e-5, atol=1e-6)
    expected = reference.gsnr_ratio(list(chunks), 0.1, EPS)
    torch.testing.assert_close(ratio(chunks, 0.1).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_layer_too_small_to_be_squared_has_no_gradient() -> None:
    least, numel = gsnr.LEAST_SQUARE, torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64)
    square = torch.tensor([3.0 * least, 2.9 * least, 0.0], dtype=torch.float64)
    mean, divisor = gsnr.layer_mean(torch.tensor([6.0, 6.0, 0.0], dtype=torch.float64), square, numel)
    assert mean.tolist() == [2.0, 0.0, 0.0]
    assert divisor.tolist() == [2.0, torch.inf, torch.inf]
    assert gsnr.normalized_ratio(torch.full((3,), 2.0), divisor.float()).tolist() == [1.0, 0.0, 0.0]


def test_squares_that_underflow_give_no_nan() -> None:
    # (1e-30)**2 is 0 in fp32: such an element counts as one without gradient
    r = gsnr.raw_ratio(torch.tensor([1e-30, 1e-22, 1.0]), torch.tensor([0.0, 1e-44, 1.0]), 2, EPS)
    assert torch.isfinite(r).all()
    assert r[2] == 2.0


def test_noise_and_signal_by_hand() -> None:
    # 4 chunks of 2 samples: variance 3 is 3 * 4/3 = 4 unbiased; |G|^2 = 9 - 4/4 = 8; B = 2 * 4 / 8
    assert gsnr.noise_and_signal(torch.tensor(9.0), torch.tensor(3.0), 4, 2.0) == (8.0, 8.0)
    # a mean that is all noise: |G|^2 = 0
    assert gsnr.noise_and_signal(torch.tensor(1.0), torch.tensor(3.0), 4, 2.0) == (8.0, 0.0)


def test_noise_and_signal_are_unbiased() -> None:
    # Three equally likely samples: the mean over all 3^4 draws of two chunks of two is the expectation, exactly.
    samples = torch.tensor([[1.0, 0.0], [4.0, -2.0], [-2.0, 5.0]], dtype=torch.float64)
    mean = samples.mean(0)
    right = (samples - mean).square().mean(0).sum(), mean.square().sum()
    found = []
    for drawn in itertools.product(samples, repeat=4):
        chunks = torch.stack(drawn).view(2, 2, 2).mean(1)
        square, variance = chunks.mean(0).square().sum(), chunks.var(0, unbiased=False).sum()
        found.append(torch.stack(gsnr.noise_and_signal(square, variance, 2, 2)))
    torch.testing.assert_close(torch.stack(found).mean(0), torch.stack(right), rtol=1e-14, atol=0)
