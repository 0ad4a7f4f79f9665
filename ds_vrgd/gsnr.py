"""The gradient signal-to-noise ratio (GSNR) as pure functions on tensors: the formulas, each once.

A *chunk* is one micro-batch on one data-parallel rank; a step sees ``k`` chunks with gradients ``g_1 .. g_k``. The
functions need only their mean ``gbar`` and their centred sum of squares ``m2``. Element by element::

    var  = m2 / k                                                             (equation 7)
    r    = gbar^2 / max(var, gsnr_eps gbar^2)           with 0/0 = 0          (equation 2)
    r    = r / mean of r over the layer                                       (equation 8)
    r    = min(max(r, gamma), 1)                                              (equation 9)
    p    = beta3 p + (1 - beta3) r;  phat = p / (1 - beta3^t)                 (VRAdam, VRAdamW and VRLAMB)

Source: "Accelerating Large Batch Training via Gradient Signal to Noise Ratio (GSNR)", section 4, equations 2 and 7 to
9; McCandlish et al. 2018, appendix A.1, for the noise scale.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: The least variance of an element, and the least mean square of a layer that has a gradient: the smallest normal
#: number of fp32, below which squares lose their digits.
LEAST_SQUARE = torch.finfo(torch.float32).tiny

#: Memory for a result and for values on the way to it; None for new memory.
Scratch = tuple[Tensor | None, Tensor | None]
NEW: Scratch = (None, None)


def raw_ratio(total: Tensor, m2: Tensor, k: float, gsnr_eps: float, parts: int = 1) -> Tensor:
    """Return the squared mean over the variance of every element (equations 2 and 7), with 0/0 = 0.

    The floor of the variance is relative to the squared mean, and caps the ratio at ``1 / gsnr_eps``: so the ratio does
    not depend on the loss scale, averaging or clipping. A standard deviation below 1.1e-19 (the root of
    :data:`LEAST_SQUARE`) counts as 1.1e-19, in fp64 too.

    Args:
        total: ``parts`` times the mean gradient over the chunks, any shape, fp32 or wider.
        m2: sum over the chunks of ``(g_d - gbar)**2``, same shape.
        k: number of chunks; the variance is ``m2 / k``.
        gsnr_eps: relative floor of the variance.
        parts: what ``total`` is to be divided by.

    Returns:
        The dimensionless ratio, of ``total``'s shape and dtype.
    """
    ratio, factor = _over_variance(total.square(), m2, k, gsnr_eps, parts, None)
    return ratio.mul_(factor)


def ratio_sums(
    total: Tensor, m2: Tensor, k: float, gsnr_eps: float, parts: int = 1, scratch: Scratch = NEW
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of the raw ratio, of the squared ``total`` and of ``m2``: three scalars.

    The arguments are those of :func:`raw_ratio`, and memory like ``total``.
    """
    square = torch.mul(total, total, out=scratch[0])
    of_square = square.sum()
    ratio, factor = _over_variance(square, m2, k, gsnr_eps, parts, scratch[1])
    return ratio.sum() * factor, of_square, m2.sum()


def _over_variance(
    square: Tensor, m2: Tensor, k: float, gsnr_eps: float, parts: int, spare: Tensor | None
) -> tuple[Tensor, float]:
    """Return the raw ratio without its constant factor, and the factor. The squared total is overwritten."""
    factor = k / parts**2
    floored = torch.clamp(m2, min=k * LEAST_SQUARE, out=spare)
    return square.div_(floored).clamp_(max=1.0 / (gsnr_eps * factor)), factor


def layer_mean(raw: Tensor, square: Tensor, numel: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean raw ratio of each layer, and what the ratios of its elements are to be divided by.

    A layer whose gradient has a root mean square below 1.1e-19 (:data:`LEAST_SQUARE`) counts as one without gradient:
    its mean is 0, and its elements are divided by infinity.

    Args:
        raw, square: sums over each layer of the raw ratio and of the squared mean gradient, ``(L,)``.
        numel: elements of each layer, ``(L,)``.
    """
    lost = square < LEAST_SQUARE * numel
    mean = raw / numel
    return mean.masked_fill(lost, 0.0), mean.masked_fill(lost, torch.inf)


def normalized_ratio(raw: Tensor, layer_mean: Tensor | float) -> Tensor:
    """Divide the ratio by its mean over the layer (equation 8), in place, with 0/0 = 0.

    Args:
        raw: :func:`raw_ratio` of (a shard of) a layer; overwritten.
        layer_mean: what :func:`layer_mean` divides by, broadcastable to ``raw``.
    """
    return raw.mul_(1.0 / (layer_mean + (layer_mean == 0)))


def ratio_of_layer(
    total: Tensor, m2: Tensor, k: float, gsnr_eps: float, parts: int, layer_mean: Tensor | float, scratch: Scratch = NEW
) -> Tensor:
    """Return the normalized ratio of (a shard of) a layer: equations 2, 7 and 8 in one go.

    The arguments are those of :func:`raw_ratio` and :func:`normalized_ratio`, and memory like ``total``.
    """
    ratio, factor = _over_variance(torch.mul(total, total, out=scratch[0]), m2, k, gsnr_eps, parts, scratch[1])
    return normalized_ratio(ratio, layer_mean / factor)


def clamped_ratio(ratio: Tensor, gamma: float) -> Tensor:
    """Confine the ratio to ``[gamma, 1]`` (equation 9), in place."""
    return ratio.clamp_(gamma, 1.0)


def advance_average(average: Tensor, ratio: Tensor, beta3: float, step: int, first: int, begins: bool) -> Tensor:
    """Advance the running mean of the ratio: ``p = beta3 p + (1 - beta3) r``.

    An average that begins late (a checkpoint of the base optimizer brought ``step`` but no average) begins as if every
    earlier ratio had equalled the first, which keeps its debiasing exact.

    Args:
        average: p before the step, in any floating dtype; overwritten, in bf16 by :func:`round_stochastically`.
        ratio: r of this step, of the same shape, fp32 or wider.
        beta3: decay of the running mean.
        step: number of this ratio, ``t``, from 1: that of the step, unless a step has had no ratio.
        first: which of the flattened layer's elements the first of ``ratio`` is.
        begins: whether ``average`` is still uninitialised.

    Returns:
        p in ``ratio``'s dtype, before it is rounded, not to be changed. Divided by ``1 - beta3**step`` it is phat.
    """
    p = ratio * (1.0 - beta3 ** (step - 1)) if begins else average.to(ratio.dtype)
    p.mul_(beta3).add_(ratio, alpha=1.0 - beta3)
    if p is not average:
        average.copy_(round_stochastically(p.float(), first, step) if average.dtype == torch.bfloat16 else p)
    return p


def round_stochastically(values: Tensor, first: int, step: int) -> Tensor:
    """Round fp32 values to bf16: up with the probability of the bits that are cut off, so that the mean is kept.

    Rounded to the nearest, a running mean stands still as soon as a step would move it by less than half a unit in the
    last of bf16's 8 bits. The noise depends on the element's index in its layer and on the step alone: the same on
    every rank, at every ZeRO stage, after a resume, and in the Triton kernels.

    Args:
        values: fp32, any shape, finite.
        first: which of the flattened layer's elements the first is; the others follow.
        step: number of the step.

    Returns:
        bf16, of ``values``' shape.
    """
    index = torch.arange(values.numel(), dtype=torch.int32, device=values.device).add_(_signed(first))
    noise = _hash(index.bitwise_xor_(rounding_seed(step))).bitwise_and_(0xFFFF).view(values.shape)
    return noise.add_(values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


@lru_cache(maxsize=64)
def rounding_seed(step: int) -> int:
    """Return the seed of :func:`round_stochastically` for a step: a signed 32-bit number."""
    return int(_hash(torch.tensor(_signed(step), dtype=torch.int32)))


def _hash(x: Tensor) -> Tensor:
    """Hash the bits of int32 numbers, in place ("lowbias32" of C. Wellons' hash-prospector)."""
    # The right shift of signed integers brings in the sign, which is masked out.
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(number: int) -> int:
    """Return the signed 32-bit integer of the same low bits."""
    return (number + 2**31) % 2**32 - 2**31


def noise_and_signal(square_of_mean: Tensor, variance: Tensor, k: int, chunk_size: float) -> tuple[Tensor, Tensor]:
    """Unbiased estimates of ``tr(Sigma)`` and ``|G|^2`` from the chunks of one step (McCandlish et al. 2018, A.1).

    A sample's gradient has mean ``G`` and covariance ``Sigma``; ``g_d``, the mean over the ``b`` samples of chunk
    ``d``, has covariance ``Sigma / b``; ``k`` independent chunks have the mean ``gbar``::

        E sum_d |g_d - gbar|^2 = (k - 1) tr(Sigma) / b      (Bessel)
        E |gbar|^2             = |G|^2 + tr(Sigma) / (k b)

    So with ``s = sum_d |g_d - gbar|^2 / (k - 1)``, ``b s`` is unbiased for ``tr(Sigma)`` and ``|gbar|^2 - s / k`` for
    ``|G|^2``, which may come out negative. They are the appendix's own pair, averaged over the chunks.

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
