"""The arguments of the update kernels: the gradient of a step with its ratio, and the state of each rule.

The kernels read them as tuples. A field that is None is known when a kernel is compiled, and costs nothing there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Source(NamedTuple):
    """The gradient of a step over one shard, and what its ratio is made of. Tensors are fp32 unless stated otherwise.

    Attributes:
        grad: the gradient that the ratio scales; None if it is ``total``.
        scale: a scalar that ``grad`` must be multiplied by; None for 1.
        total, m2: moments of the chunks; None without GSNR.
        means: ``(layers,)`` fp64, the divisor of each layer's raw ratio: its mean, or infinity.
        average: the running mean of the ratio, fp32 or bf16; None if it is not averaged. Without ``total`` it is not
            advanced: it scales the gradient as it is.
        k, parts, gsnr_eps, gamma: number of chunks, the divisor of ``total``, and the group's arguments.
        beta3, rest3: decay of the running mean, and ``1 - beta3``.
        debias: ``1 / (1 - beta3**t)``, for the ``t``-th ratio.
        earlier: ``1 - beta3**(t - 1)`` if the average begins in this step, with nothing in it yet; else None.
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
    earlier: float | None = None


class MomentumState(NamedTuple):
    """Weights and momentum buffer of one shard, fp32, and the numbers of a step of SGD or LARS.

    Attributes:
        weights: of the shard.
        buffer: momentum buffer; None for none.
        trust: ``(layers,)``, the trust ratios that scale what the buffer receives; None for 1.
        lr, decay, momentum: the group's.
        lookahead: the momentum again, for Nesterov's step; None for the plain one.
    """

    weights: Tensor
    buffer: Tensor | None
    trust: Tensor | None = None
    lr: float = 0.0
    decay: float = 0.0
    momentum: float = 0.0
    lookahead: float | None = None


class AdamState(NamedTuple):
    """Weights and both moments of one shard, fp32, and the numbers of a step of Adam or LAMB.

    Attributes:
        weights, exp_avg, exp_avg_sq: of the shard.
        eps, decay: the group's.
        rest1, beta2, rest2: ``1 - beta1``, ``beta2``, ``1 - beta2``.
        debias1, debias2: factors that debias the first moment, and the root of the second.
        lr: learning rate of Adam.
        shrink: ``1 - lr * weight_decay`` if decay is decoupled (AdamW); None if it is added to the gradient.
        rates: ``(layers,)``, learning rate times trust ratio of LAMB.
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
    lr: float = 0.0
    shrink: float | None = None
    rates: Tensor | None = None
