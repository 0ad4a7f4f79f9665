"""Adam and AdamW as a pure function; VR-Adam and VR-AdamW: the averaged ratio in front of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.optimizer import ParamsT

from ds_vrgd.kernels.records import AdamNumbers
from ds_vrgd.optim.observer import Shard
from ds_vrgd.optim.optimizer import VROptimizer
from ds_vrgd.optim.options import documented, passed
from ds_vrgd.optim.passes import Piece
from ds_vrgd.optim.ranks.watch import RankEvent


def adam(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Update weights and both moments by Adam, in place; by AdamW where weight decay is decoupled.

    ::

        g = g + weight_decay w              AdamW: w = w - lr weight_decay w
        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        weights, gradient, exp_avg, exp_avg_sq: ``w``, ``g``, ``m`` and ``v``, of any one shape.
        step: number of this step, ``t``, from 1; infinity for no debiasing.
        lr, betas, eps, weight_decay: the group's.
        decoupled: whether this is AdamW.
    """
    beta1, beta2 = betas
    debias1, debias2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
    if in_one_pass(weights, gradient, exp_avg, exp_avg_sq):
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        fused(
            [weights], [gradient], [exp_avg], [exp_avg_sq], [], [torch.scalar_tensor(step)], lr=lr,
            beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    if decoupled:
        weights.mul_(1.0 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient.add(weights, alpha=weight_decay)
    exp_avg.lerp_(gradient, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    weights.addcdiv_(exp_avg, exp_avg_sq.sqrt().div_(debias2).add_(eps), value=-lr / debias1)


def in_one_pass(*tensors: Tensor) -> bool:
    """Return whether torch's own kernel does the rule in one pass over memory: on fp32, contiguous, on a CPU."""
    return all(t.device.type == "cpu" and t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def adam_numbers(group: dict[str, Any], step: int) -> AdamNumbers:
    """Return what the kernels of Adam and LAMB need of a param group in its step number ``step``."""
    beta1, beta2 = group["betas"]
    debias = group.get("bias_correction", True)
    return AdamNumbers(
        float(group["eps"]), float(group["weight_decay"]), 1.0 - beta1, beta2, 1.0 - beta2,
        1.0 / (1.0 - beta1**step) if debias else 1.0, (1.0 - beta2**step) ** -0.5 if debias else 1.0,
    )  # fmt: skip


@documented
class VRAdam(VROptimizer):
    """Adam whose two moments both take ``ghat = phat * gbar``, with phat the debiased running mean of r.

    The order (average the ratio, scale the mean gradient, then estimate the moments) is our reading of the VRGD paper's
    section 4.2; its appendix D, which holds the algorithm, is not available. At ``gamma=1`` this is
    ``torch.optim.Adam``, bitwise.
    """

    counts_steps = True
    averages_ratio = True
    _keys = ("exp_avg", "exp_avg_sq")
    kernels = ("adam_step",)
    decoupled_decay: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        gsnr_dtype: Literal["float32", "bfloat16"] | torch.dtype = "float32",
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))

    def _update_piece(self, piece: Piece, trust: Tensor | float | None) -> None:
        group, moments = piece.shard.group, (piece.state("exp_avg"), piece.state("exp_avg_sq"))
        arguments = {key: group[key] for key in ("betas", "eps", "weight_decay")}
        step, lr = float(piece.shard.state["step"]), float(group["lr"])
        adam(piece.weights, piece.gradient(), *moments, step, lr=lr, decoupled=self.decoupled_decay, **arguments)

    def _numbers(self, group: dict[str, Any], step: int) -> AdamNumbers:
        lr = float(group["lr"])
        shrink = 1.0 - lr * group["weight_decay"] if self.decoupled_decay else None
        return adam_numbers(group, step)._replace(lr=lr, shrink=shrink)

    def _update_as_torch(self, group: dict[str, Any], shards: Sequence[Shard]) -> None:
        beta1, beta2 = group["betas"]
        averages, squares, steps = ([shard.part(key) for shard in shards] for key in ("exp_avg", "exp_avg_sq", "step"))
        torch_adam(
            [shard.tensor for shard in shards], [shard.grad for shard in shards], averages, squares, [], steps,
            foreach=None, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=group["lr"], eps=group["eps"],
            weight_decay=group["weight_decay"], decoupled_weight_decay=self.decoupled_decay,
        )  # fmt: skip


@documented
class VRAdamW(VRAdam):
    """AdamW on the variance-reduced gradient: :class:`VRAdam` with decoupled weight decay, 0.01 by default.

    At ``gamma=1`` this is ``torch.optim.AdamW``, bitwise.
    """

    decoupled_decay = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        gsnr_dtype: Literal["float32", "bfloat16"] | torch.dtype = "float32",
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))
