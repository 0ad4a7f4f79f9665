"""The arguments of the update kernels: the tensors of a shard, and the numbers of a step.

The kernels read them as tuples. A field that is None is known when a kernel is compiled, and costs nothing there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Tensors(NamedTuple):
    """The tensors of one shard, flat, contiguous and fp32 unless stated otherwise; None for those that a step lacks."""

    weights: Tensor | None = None
    grad: Tensor | None = None  # the gradient that the ratio scales; None if it is ``total``
    total: Tensor | None = None  # with ``m2``, the moments of the chunks; None without GSNR
    m2: Tensor | None = None
    # The running mean of the ratio, fp32 or bf16, if it is averaged. Without ``total`` it scales the gradient as it is.
    average: Tensor | None = None
    buffer: Tensor | None = None  # momentum buffer of SGD and LARS
    exp_avg: Tensor | None = None  # the first moment of Adam and LAMB
    exp_avg_sq: Tensor | None = None  # the second
    scale: Tensor | None = None  # a scalar that ``grad`` must be multiplied by, of any floating dtype; None for 1


class RatioNumbers(NamedTuple):
    """The numbers that the ratio of a shard is made with."""

    k: float = 0.0  # number of chunks
    parts: float = 1.0  # divisor of ``total``
    gsnr_eps: float = 0.0
    gamma: float = 1.0
    beta3: float = 0.0
    rest3: float = 1.0  # 1 - beta3
    debias: float = 1.0  # 1 / (1 - beta3**t), for the t-th ratio
    earlier: float | None = None  # 1 - beta3**(t - 1) if the average begins in this step, with nothing in it yet


class MomentumNumbers(NamedTuple):
    """The numbers of a step of SGD or LARS."""

    lr: float
    decay: float
    momentum: float
    lookahead: float | None = None  # the momentum again, for Nesterov's step; None for the plain one


class AdamNumbers(NamedTuple):
    """The numbers of a step of Adam or LAMB."""

    eps: float
    decay: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float  # 1 - beta2
    debias1: float  # the factor that debiases the first moment
    debias2: float  # that of the root of the second
    lr: float = 0.0  # of Adam
    shrink: float | None = None  # 1 - lr * weight_decay if decay is decoupled (AdamW); None if the gradient takes it in


class Columns(NamedTuple):
    """The findings of earlier passes, by layer."""

    means: Tensor | None = None  # (layers,) fp64, the divisor of each layer's raw ratio: its mean, or infinity
    trust: Tensor | None = None  # (layers,) fp32, LARS' trust ratio, or LAMB's times its learning rate


class ShardCall(NamedTuple):
    """The arguments of a kernel for one shard."""

    tensors: Tensors
    ratio: RatioNumbers = RatioNumbers()
    rule: AdamNumbers | MomentumNumbers | None = None  # the optimizer's own numbers; None for a kernel without a rule
    seed: int = 0  # of the stochastic rounding of this step, a signed 32-bit number
