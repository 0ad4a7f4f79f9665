"""LAMB as pure functions; VR-LAMB: the averaged ratio in front of them.

The norms are those of whole layers, however they are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_vrgd.kernels.records import AdamNumbers
from ds_vrgd.optim.adam import adam, adam_numbers
from ds_vrgd.optim.lars import trust_ratio
from ds_vrgd.optim.observer import Shard
from ds_vrgd.optim.optimizer import VROptimizer
from ds_vrgd.optim.options import documented, passed
from ds_vrgd.optim.passes import Piece
from ds_vrgd.optim.ranks.watch import RankEvent


def lamb_update(
    weights: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    group: dict[str, Any],
    out: Tensor | None = None,
) -> Tensor:
    """Advance both moments of LAMB, in place, and return its update ``u``.

    ::

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w

    Args:
        weights, gradient, exp_avg, exp_avg_sq: ``w``, ``g``, ``m`` and ``v``, of any one shape.
        step: number of this step, ``t``, from 1; infinity for no debiasing.
        group: the param group.
        out: memory for ``u``, like ``w``; None for new memory.
    """
    update = torch.zeros_like(weights) if out is None else out.zero_()
    # The step of Adam from weights of 0 at a rate of -1 is its direction.
    adam(update, gradient, exp_avg, exp_avg_sq, step, lr=-1.0, betas=group["betas"], eps=group["eps"])
    return update.add_(weights, alpha=group["weight_decay"])


def lamb_rate(w: Tensor, u: Tensor, group: dict[str, Any]) -> Tensor:
    """Return LAMB's rate of each layer, ``lr |w| / |u|``: with a trust ratio of 1 where either norm is 0.

    Args:
        w, u: ``(layers,)``, 2-norms of the weights and of the update over whole layers.
        group: the param group, whose ``trust_clip`` bounds the trust ratio.
    """
    return trust_ratio(w, u, (w > 0) & (u > 0), group).mul_(group["lr"])


def lamb_step(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: float,
    rate: Tensor | float,
    group: dict[str, Any],
    out: Tensor | None = None,
) -> None:
    """Update the weights by LAMB, ``w = w - rate u``, in place.

    ``u`` is computed again, from the moments that :func:`lamb_update` has left: to keep it would take the memory of a
    whole shard.

    Args:
        weights, exp_avg, exp_avg_sq, step, out: as there.
        rate: a scalar, the layer's :func:`lamb_rate`.
        group: the param group.
    """
    beta1, beta2 = group["betas"]
    debias1, debias2 = 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)
    root = torch.sqrt(exp_avg_sq, out=out).mul_(debias1 / debias2).add_(group["eps"] * debias1)
    update = torch.div(exp_avg, root, out=root).add_(weights, alpha=group["weight_decay"])
    weights.sub_(update.mul_(rate))


@documented
class VRLAMB(VROptimizer):
    """LAMB whose two moments both take ``ghat = phat * gbar``, with phat the debiased running mean of r.

    ``u = mhat / (sqrt(vhat) + eps) + weight_decay * w``; ``w -= lr * |w| / |u| * u``, with both norms over the whole
    layer, and their ratio 1 where either is 0. The order of averaging and scaling is our reading of the VRGD paper's
    section 4.2; its appendix D, which holds the algorithm, is not available. At ``gamma=1`` this is :class:`LAMB`.

    Source: You et al. 2019, "Large Batch Optimization for Deep Learning", algorithm 2; the VRGD paper, section 4.2.
    """

    counts_steps = True
    averages_ratio = True
    sums_layers = True
    _keys = ("exp_avg", "exp_avg_sq")
    _trust = staticmethod(lamb_rate)
    kernels = ("lamb_advance", "lamb_apply")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        gsnr_dtype: Literal["float32", "bfloat16"] | torch.dtype = "float32",
        bias_correction: bool = True,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool = True,
        prenormalize: bool = False,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))

    def _measured(self, piece: Piece) -> Tensor:
        moments, out = (piece.state("exp_avg"), piece.state("exp_avg_sq")), piece.scratch[1]
        step = _debiasing_step(piece.shard)
        return lamb_update(piece.weights, piece.gradient(), *moments, step, piece.shard.group, out)

    def _update_piece(self, piece: Piece, trust: Tensor | float | None) -> None:
        assert trust is not None
        moments, out = (piece.state("exp_avg"), piece.state("exp_avg_sq")), piece.scratch[1]
        lamb_step(piece.weights, *moments, _debiasing_step(piece.shard), trust, piece.shard.group, out)

    def _numbers(self, group: dict[str, Any], step: int) -> AdamNumbers:
        return adam_numbers(group, step)

    def _prescale(self, shards: Sequence[Shard]) -> None:
        """Divide by the gradient's norm over the whole model, where the group says so."""
        chosen = [shard for shard in shards if shard.group["prenormalize"]]
        if chosen:
            norm = self.observer.grad_norm([shard.param for shard in shards])
            factor = torch.where(norm > 0, 1.0 / norm, torch.ones_like(norm))
            for shard in chosen:
                own = factor.to(shard.grad.dtype)
                shard.scale = own if shard.scale is None else shard.scale * own


def _debiasing_step(shard: Shard) -> float:
    return float(shard.state["step"]) if shard.group["bias_correction"] else math.inf


@documented
class LAMB(VRLAMB):
    """LAMB without variance reduction: :class:`VRLAMB` at ``gamma=1``, exact under every ZeRO stage."""

    reduces_variance = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool = True,
        prenormalize: bool = False,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()), gamma=1.0)
