"""The gradient signal-to-noise ratio (GSNR) as pure functions on tensors.

A *chunk* is one micro-batch on one data-parallel rank; a step sees ``k`` chunks with mean gradients
``g_1 .. g_k``. Everything here needs only their mean and their centred sum of squares (``m2``), so
it never meets the chunks themselves.

Source: "Accelerating Large Batch Training via Gradient Signal to Noise Ratio (GSNR)", section 4,
equations 2 and 7 to 9; McCandlish et al. 2018, appendix A.1, for the noise scale.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_Integers = TypeVar("_Integers", int, Tensor)


def raw_ratio(mean: Tensor, m2: Tensor, k: int, gsnr_eps: float) -> Tensor:
    """Squared mean over variance of every element (equations 2 and 7), with 0/0 = 0.

    The floor of the variance is relative to the squared mean, so the ratio depends neither on the loss
    scale nor on averaging or clipping, and never exceeds ``1 / gsnr_eps``.

    Args:
        mean: mean gradient over the chunks, any shape, fp32 or wider.
        m2: sum over the chunks of ``(g_d - mean)**2``, same shape.
        k: number of chunks; the variance is ``m2 / k``.
        gsnr_eps: relative floor of the variance.

    Returns:
        The dimensionless ratio, of ``mean``'s shape and dtype.
    """
    square = mean.square()
    variance = torch.maximum(m2 / k, square * gsnr_eps)
    # The variance is 0 only where the squared mean is: dividing by 1 there gives the 0/0 = 0 we want.
    return square.div_(variance.masked_fill_(variance == 0, 1.0))


def normalized_ratio(raw: Tensor, layer_mean: Tensor) -> Tensor:
    """Ratio divided by its mean over the layer (equation 8), in place, with 0/0 = 0.

    Args:
        raw: :func:`raw_ratio` of (a shard of) a layer; overwritten.
        layer_mean: mean of the raw ratio over the whole layer, broadcastable to ``raw``.
    """
    return raw.div_(torch.where(layer_mean == 0, torch.ones_like(layer_mean), layer_mean))


def clamped_ratio(ratio: Tensor, gamma: float) -> Tensor:
    """Ratio confined to ``[gamma, 1]`` (equation 9), in place."""
    return ratio.clamp_(gamma, 1.0)


def rounding_seed(step: int) -> int:
    """Seed of :func:`round_stochastically` for a step: a signed 32-bit number."""
    seed = _mixed(step % 2**32)
    return seed - 2**32 if seed >= 2**31 else seed


def round_stochastically(values: Tensor, index: Tensor, seed: int) -> Tensor:
    """fp32 values rounded to bf16: up with the probability of the bits that are cut off, so that the mean is kept.

    Rounded to the nearest, a running mean stands still as soon as a step would move it by less than half a unit in
    the last of bf16's 8 bits. The noise depends on the element's place in its layer and on the step alone: the same on
    every rank, at every ZeRO stage, after a resume, and in the Triton kernel (``kernels/shared.py``).

    Args:
        values: ``(n,)`` fp32, finite.
        index: ``(n,)`` int64, places in the flattened layer.
        seed: from :func:`rounding_seed`.

    Returns:
        ``(n,)`` bf16.
    """
    noise = _mixed((index & 0xFFFFFFFF) ^ (seed % 2**32)) & 0xFFFF
    bits = ((values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF) + noise) & 0xFFFF0000
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32).to(torch.bfloat16)


def _mixed(x: _Integers) -> _Integers:
    """A hash of 32-bit integers, held in int64 ("lowbias32" of C. Wellons' hash-prospector)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def noise_and_signal(square_of_mean: Tensor, variance: Tensor, k: int, chunk_size: float) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of ``tr(Sigma)`` and ``|G|^2`` from the chunks of one step (McCandlish et al. 2018, A.1).

    A sample's gradient has mean ``G`` and covariance ``Sigma``; ``g_d``, the mean over the ``b`` samples of chunk
    ``d``, has covariance ``Sigma / b``; ``k`` independent chunks have the mean ``gbar``::

        E sum_d |g_d - gbar|^2 = (k - 1) tr(Sigma) / b      (Bessel)
        E |gbar|^2             = |G|^2 + tr(Sigma) / (k b)

    So with ``s = sum_d |g_d - gbar|^2 / (k - 1)``, ``b s`` is unbiased for ``tr(Sigma)`` and ``|gbar|^2 - s / k`` for
    ``|G|^2``, for any distribution of the gradients; the appendix's own pair, with one chunk as the small batch and all
    of them as the big one, is the same numbers averaged over the chunks. The second may be negative.

    Args:
        square_of_mean: ``|gbar|^2``, summed over the elements wanted.
        variance: the 1/k variance over the chunks, summed over the same elements.
        k: number of chunks, at least 2.
        chunk_size: samples in one chunk, ``b``.

    Returns:
        (``tr(Sigma)`` of one sample, ``|G|^2``), in the squared units of the gradients.
    """
    of_chunk_mean = variance * (k / (k - 1))
    return chunk_size * of_chunk_mean, square_of_mean - of_chunk_mean / k


def noise_scale(square_of_mean: Tensor, variance: Tensor, k: int, chunk_size: float) -> Tensor:
    """Simple gradient noise scale ``tr(Sigma) / |G|^2`` in samples (McCandlish et al. 2018, eq. 2.9).

    The ratio of the two unbiased estimates of :func:`noise_and_signal`, whose arguments it takes; as a ratio it is not
    unbiased itself.

    Returns:
        The noise scale in samples; infinite or negative where the mean is lost in the noise.
    """
    noise, signal = noise_and_signal(square_of_mean, variance, k, chunk_size)
    return noise / signal
