"""The arguments of the update kernels: the tensors of a shard, and the numbers of a step.

The kernels read them as tuples. A field that is None is known when a kernel is compiled, and costs nothing there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """The tensors of one shard, flat, contiguous and fp32 unless stated otherwise; None for those that a step lacks.

    Attributes:
        weights: of the shard.
        grad: the gradient that the ratio scales; None if it is ``total``.
        total, m2: moments of the chunks; None without GSNR.
        average: the running mean of the ratio, fp32 or bf16; None if it is not averaged. Without ``total`` it is not
            advanced: it scales the gradient as it is.
        buffer: momentum buffer of SGD and LARS.
        exp_avg, exp_avg_sq: moments of Adam and LAMB.
        scale: a scalar that ``grad`` must be multiplied by, of any floating dtype; None for 1.
    """

    weights: Tensor | None = None
    grad: Tensor | None = None
    total: Tensor | None = None
    m2: Tensor | None = None
    average: Tensor | None = None
    buffer: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    scale: Tensor | None = None


class RatioNumbers(NamedTuple):
    """The numbers that the ratio of a shard is made with.

    Attributes:
        k, parts, gsnr_eps, gamma: number of chunks, the divisor of ``total``, and the group's arguments.
        beta3, rest3: decay of the running mean, and ``1 - beta3``.
        debias: ``1 / (1 - beta3**t)``, for the ``t``-th ratio.
        earlier: ``1 - beta3**(t - 1)`` if the average begins in this step, with nothing in it yet; else None.
    """

    k: float = 0.0
    parts: float = 1.0
    gsnr_eps: float = 0.0
    gamma: float = 1.0
    beta3: float = 0.0
    rest3: float = 1.0
    debias: float = 1.0
    earlier: float | None = None


class MomentumNumbers(NamedTuple):
    """The numbers of a step of SGD or LARS.

    Attributes:
        lr, decay, momentum: the group's.
        lookahead: the momentum again, for Nesterov's step; None for the plain one.
    """

    lr: float
    decay: float
    momentum: float
    lookahead: float | None = None


class AdamNumbers(NamedTuple):
    """The numbers of a step of Adam or LAMB.

    Attributes:
        eps, decay: the group's.
        rest1, beta2, rest2: ``1 - beta1``, ``beta2``, ``1 - beta2``.
        debias1, debias2: factors that debias the first moment, and the root of the second.
        lr: learning rate of Adam.
        shrink: ``1 - lr * weight_decay`` if decay is decoupled (AdamW); None if it is added to the gradient.
    """

    eps: float
    decay: float
    rest1: float
    beta2: float
    rest2: float
    debias1: float
    debias2: float
    lr: float = 0.0
    shrink: float | None = None


class Columns(NamedTuple):
    """The findings of earlier passes, by layer.

    Attributes:
        means: ``(layers,)`` fp64, the divisor of each layer's raw ratio: its mean, or infinity.
        trust: ``(layers,)`` fp32, the trust ratio of LARS, or LAMB's learning rate times its trust ratio.
    """

    means: Tensor | None = None
    trust: Tensor | None = None


class ShardCall(NamedTuple):
    """The arguments of a kernel for one shard.

    Attributes:
        tensors, ratio: the shard's tensors, and the numbers of its ratio.
        rule: the numbers of the optimizer's own rule; None for a kernel that has none.
        seed: seed of the stochastic rounding of this step, a signed 32-bit number.
    """

    tensors: Tensors
    ratio: RatioNumbers = RatioNumbers()
    rule: AdamNumbers | MomentumNumbers | None = None
    seed: int = 0
