"""LARS and VR-LARS, with trust ratios of whole layers however they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ds_vrgd.optim.arguments import refuse_gsnr
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard
from ds_vrgd.optim.trust import over_shard, trust_ratio


class VRLARS(VROptimizer):
    """LARS on ``g = r * gbar``.

    ``ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)``, norms over the whole layer, and 1 where
    ``|w|`` or ``|g|`` is 0; ``d = ratio * (g + weight_decay * w)`` feeds the momentum buffer, and the learning rate
    scales what comes out of it (as in ``torch.optim.SGD``; LARS' paper scales what goes in, which is the same at a
    constant rate).

    Args:
        params: parameters, or param groups that may override every argument.
        lr: learning rate.
        momentum: decay of the momentum buffer, in [0, 1).
        nesterov: look ahead, as ``torch.optim.SGD`` does.
        weight_decay: L2 coefficient.
        trust_coefficient: LARS' eta.
        eps: added to the ratio's denominator, in the gradient's units.
        gamma: floor of r, in (0, 1] (equation 9); 1 is LARS.
        gsnr_eps: floor of the variance relative to the squared mean.
        trust_clip: bounds ``(lo, hi)`` of the ratio, or None.
        adapt: False for a ratio of 1; meant for the param group of biases and normalisation weights.

    Raises:
        ValueError: an argument out of its range.

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1; the VRGD paper,
    section 4.
    """

    def __init__(
        self,
        params: Iterable[Any],
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
        **unknown: Any,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "trust_coefficient": trust_coefficient,
                "eps": eps,
                "gamma": gamma,
                "gsnr_eps": gsnr_eps,
                "trust_clip": trust_clip,
                "adapt": adapt,
            },
            unknown,
        )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, also at momentum 0, where it holds the last step."""
        return ("momentum_buffer",)

    def _update(self, shards: Sequence[Shard]) -> None:
        weight_norms, grad_norms = self.layer_norms(
            shards, [shard.tensor for shard in shards], [shard.grad for shard in shards]
        )
        for shard, layout, w, g in zip(shards, self.table(shards).layouts, weight_norms, grad_norms, strict=True):
            group = shard.group
            denominator = g + group["weight_decay"] * w + group["eps"]
            ratio = trust_ratio(group["trust_coefficient"] * w, denominator, (w > 0) & (g > 0), group)
            step = shard.grad.add(shard.tensor, alpha=group["weight_decay"]).mul_(
                over_shard(layout, ratio, shard.tensor)
            )
            buffer = shard.state["momentum_buffer"].mul_(group["momentum"]).add_(step)
            if group["nesterov"]:
                buffer = step.add_(buffer, alpha=group["momentum"])
            shard.tensor.sub_(buffer, alpha=group["lr"])


class LARS(VRLARS):
    """LARS without variance reduction: :class:`VRLARS` at ``gamma=1``, exact under every ZeRO stage.

    Takes the arguments of :class:`VRLARS` but ``gamma`` and ``gsnr_eps``.
    """

    reduces_variance = False

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **arguments: Any) -> None:
        refuse_gsnr(type(self).__name__, arguments)
        super().__init__(params, lr, gamma=1.0, **arguments)
