"""What kernels read: the gradient of a step with what becomes its ratio, and a shard's weights and moments."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Source(NamedTuple):
    """The gradient of a step over one shard, and what becomes its ratio. Tensors are fp32 unless it says otherwise.

    Attributes:
        grad: the gradient that the ratio scales; None where it is ``total``.
        scale: a scalar that ``grad`` must be multiplied by; None for 1.
        total, m2: moments of the chunks; None without GSNR.
        means: ``(layers,)`` fp64, mean of the raw ratio over each layer.
        average: the running mean of the ratio, fp32 or bf16; None where it is not averaged.
        k, parts, gsnr_eps, gamma: number of chunks, what ``total`` is to be divided by, and the group's arguments.
        beta3, rest3: decay of the running mean, and ``1 - beta3``.
        debias: ``1 / (1 - beta3**t)``.
        earlier: ``1 - beta3**(t - 1)``, what an average that begins late has seen.
    """

    grad: Tensor | None
    scale: Tensor | None = None
    total: Tensor | None = None
    m2: Tensor | None = None
    means: Tensor | None = None
    average: Tensor | None = None
    k: float = 0.0
    parts: float = 1.0
    gsnr_eps: float = 0.0
    gamma: float = 1.0
    beta3: float = 0.0
    rest3: float = 1.0
    debias: float = 1.0
    earlier: float = 0.0


class AdamState(NamedTuple):
    """Weights and moments of one shard, fp32, and the numbers of this step.

    Attributes:
        weights, exp_avg, exp_avg_sq: of the shard.
        eps, decay: as the group says.
        rest1, beta2, rest2: ``1 - beta1``, ``beta2``, ``1 - beta2``.
        debias1, debias2: what debiases the first moment, and the root of the second.
    """

    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    eps: float
    decay: float
    rest1: float
    beta2: float
    rest2: float
    debias1: float
    debias2: float
