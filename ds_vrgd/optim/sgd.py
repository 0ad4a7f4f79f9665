"""SGD with momentum as a pure function; VR-SGD and VR-Momentum: the ratio in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd as torch_sgd

from ds_vrgd.kernels.records import MomentumNumbers
from ds_vrgd.optim.observer import Shard
from ds_vrgd.optim.optimizer import VROptimizer
from ds_vrgd.optim.options import documented, passed
from ds_vrgd.optim.passes import Piece
from ds_vrgd.optim.ranks.watch import RankEvent


def sgd(
    weights: Tensor,
    gradient: Tensor,
    buffer: Tensor | None,
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    trust: Tensor | float | None = None,
    out: Tensor | None = None,
) -> None:
    """Update weights and momentum buffer by SGD, in place: the rule of ``torch.optim.SGD``, and that of LARS.

    ::

        d = trust (g + weight_decay w)
        b = momentum b + d
        w = w - lr b                        Nesterov: w = w - lr (d + momentum b)

    Args:
        weights, gradient: ``w`` and ``g``, of any one shape.
        buffer: ``b``, of that shape; None for none, and then ``w = w - lr d``.
        lr, momentum, nesterov, weight_decay: the group's.
        trust: LARS' trust ratio of the layer, a scalar; None for 1.
        out: memory for ``d``, like ``w``; None for new memory.
    """
    step = torch.add(gradient, weights, alpha=weight_decay, out=out) if weight_decay else gradient
    if trust is not None:
        step = torch.mul(step, trust, out=out)
    if buffer is not None:
        buffer.mul_(momentum).add_(step)
        step = torch.add(step, buffer, alpha=momentum, out=out) if nesterov else buffer
    weights.sub_(step, alpha=lr)


def sgd_of_piece(piece: Piece, buffer: Tensor | None, trust: Tensor | float | None = None) -> None:
    """Update a piece by :func:`sgd`, given its momentum buffer and the trust ratio of its layer."""
    arguments = {key: piece.shard.group[key] for key in ("lr", "momentum", "nesterov", "weight_decay")}
    sgd(piece.weights, piece.gradient(), buffer, trust=trust, out=piece.scratch[1], **arguments)


def momentum_numbers(group: dict[str, Any]) -> MomentumNumbers:
    """Return what the kernels of SGD and LARS need of a param group."""
    momentum, nesterov = float(group["momentum"]), group["nesterov"]
    return MomentumNumbers(float(group["lr"]), float(group["weight_decay"]), momentum, momentum if nesterov else None)


@documented
class VRSGD(VROptimizer):
    """SGD on the variance-reduced gradient, ``theta -= lr * r * gbar`` (equation 10).

    The momentum buffer takes ``r * gbar + weight_decay * w``. At ``gamma=1`` this is ``torch.optim.SGD``, bitwise; a
    ``nesterov`` without momentum is refused, too.

    Source: the VRGD paper, algorithm 1.
    """

    kernels = ("momentum_step",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and refuse one with Nesterov and without momentum."""
        merged = self.defaults | param_group
        if merged["nesterov"] is True and merged["momentum"] == 0.0:
            raise ValueError("nesterov=True needs momentum > 0, and momentum is 0")
        super().add_param_group(param_group)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the key of the momentum buffer, if there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def _update_piece(self, piece: Piece, trust: Tensor | float | None) -> None:
        sgd_of_piece(piece, piece.state("momentum_buffer") if piece.shard.group["momentum"] else None)

    def _numbers(self, group: dict[str, Any], step: int) -> MomentumNumbers:
        return momentum_numbers(group)

    def _update_as_torch(self, group: dict[str, Any], shards: Sequence[Shard]) -> None:
        torch_sgd(
            [shard.tensor for shard in shards], [shard.grad for shard in shards],
            [shard.part("momentum_buffer") if group["momentum"] else None for shard in shards],
            has_sparse_grad=False, foreach=None, weight_decay=group["weight_decay"], momentum=group["momentum"],
            lr=group["lr"], dampening=0.0, nesterov=group["nesterov"], maximize=False,
        )  # fmt: skip


@documented
class VRMomentum(VRSGD):
    """SGD with momentum on the variance-reduced gradient: :class:`VRSGD` with a momentum of 0.9 by default."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))
