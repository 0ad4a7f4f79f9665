"""LARS: trust ratios as pure functions, in front of the rule of SGD; and VR-LARS.

The norms are those of whole layers, however they are sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_vrgd.kernels.records import MomentumNumbers
from ds_vrgd.optim.optimizer import VROptimizer
from ds_vrgd.optim.options import documented, passed
from ds_vrgd.optim.passes import Piece
from ds_vrgd.optim.ranks.watch import RankEvent
from ds_vrgd.optim.sgd import momentum_numbers, sgd_of_piece


def trust_ratio(numerator: Tensor, denominator: Tensor, nonzero: Tensor, group: dict[str, Any]) -> Tensor:
    """Return ``numerator / denominator`` of every layer, 1 where not ``nonzero``, confined to ``trust_clip``.

    Args:
        numerator, denominator, nonzero: ``(layers,)``.
        group: param group with ``trust_clip`` and ``adapt``; without ``adapt`` the ratio is 1, whatever the clip.
    """
    one = torch.ones_like(numerator)
    if not group["adapt"]:
        return one
    ratio = torch.where(nonzero, numerator / torch.where(nonzero, denominator, one), one)
    return ratio if group["trust_clip"] is None else ratio.clamp(*group["trust_clip"])


def lars_ratio(w: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
    """Return LARS' trust ratio of each layer, ``trust_coefficient |w| / (|g| + weight_decay |w| + eps)``.

    It is 1 where ``|w|`` or ``|g|`` is 0, and bounded by ``trust_clip``. :func:`ds_vrgd.optim.sgd.sgd` does the rest::

        d = ratio (g + weight_decay w);  b = momentum b + d;  w = w - lr b

    Args:
        w, g: ``(layers,)``, 2-norms of the weights and of the gradient over whole layers.
        group: the param group.
    """
    numerator, denominator = group["trust_coefficient"] * w, g + group["weight_decay"] * w + group["eps"]
    return trust_ratio(numerator, denominator, (w > 0) & (g > 0), group)


@documented
class VRLARS(VROptimizer):
    """LARS on the variance-reduced gradient, ``g = r * gbar``.

    ``ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, with norms over the whole layer, and 1 where
    ``|w|`` or ``|g|`` is 0. ``d = ratio * (g + weight_decay * w)`` feeds the momentum buffer, and the learning rate
    scales what comes out of it, as in ``torch.optim.SGD``. The LARS paper scales what goes in, which is the same at a
    constant rate. At ``gamma=1`` this is :class:`LARS`.

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1; the VRGD paper,
    section 4.
    """

    sums_layers = True
    _keys = ("momentum_buffer",)  # also at momentum 0, where it holds the last step
    _trust = staticmethod(lars_ratio)
    kernels = ("lars_norms", "momentum_step")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool = True,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        nonfinite: Literal["skip", "error"] = "skip",
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()))

    def _measured(self, piece: Piece) -> Tensor:
        return piece.gradient()

    def _update_piece(self, piece: Piece, trust: Tensor | float | None) -> None:
        sgd_of_piece(piece, piece.state("momentum_buffer"), trust)

    def _numbers(self, group: dict[str, Any], step: int) -> MomentumNumbers:
        return momentum_numbers(group)


@documented
class LARS(VRLARS):
    """LARS without variance reduction: :class:`VRLARS` at ``gamma=1``, exact under every ZeRO stage."""

    reduces_variance = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        eps: float = 1e-8,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool = True,
        reduction: Literal["auto", "fused", "observe"] = "auto",
        ranks_per_node: int | None = None,
        watch: Literal["log", "error"] | Callable[[RankEvent], None] | None = None,
    ) -> None:
        super().__init__(**passed(locals()), gamma=1.0)
