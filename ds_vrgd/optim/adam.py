"""VR-Adam and VR-AdamW: the averaged ratio in front of ``torch.optim``'s own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard, by_group


class VRAdam(VROptimizer):
    """Adam whose two moments both take ``ghat = phat * gbar``, with phat the debiased running mean of r.

    The order (average the ratio, scale the mean gradient, then estimate the moments) is our reading of section 4.2; the
    paper's appendix D, which holds the algorithm, is not available.

    Args:
        params: parameters, or param groups that may override every argument.
        lr: learning rate.
        betas: decay of the first and second moment, each in [0, 1).
        beta3: decay of the running mean of the ratio, in [0, 1).
        eps: added to the root of the second moment, in the gradient's units. Where it is 0 in the weights' dtype (as
            1e-8 is in fp16), an element that never had a gradient becomes NaN, as in ``torch.optim.Adam``.
        weight_decay: L2 coefficient; ``weight_decay * w`` is added to ``ghat``.
        gamma: floor of the ratio, in (0, 1] (equation 9); 1 is ``torch.optim.Adam``, bitwise.
        gsnr_eps: floor of the variance relative to the squared mean.

    Raises:
        ValueError: an argument out of its range.
    """

    counts_steps = True
    averages_ratio = True
    _base_step: ClassVar[Callable[..., None]] = staticmethod(adam)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        **unknown: Any,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "beta3": beta3,
                "eps": eps,
                "weight_decay": weight_decay,
                "gamma": gamma,
                "gsnr_eps": gsnr_eps,
            },
            unknown,
        )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """First and second moment."""
        return ("exp_avg", "exp_avg_sq")

    def _update(self, shards: Sequence[Shard]) -> None:
        for members in by_group(shards):
            group = members[0].group
            beta1, beta2 = group["betas"]
            self._base_step(
                [shard.tensor for shard in members],
                [shard.grad for shard in members],
                [shard.state["exp_avg"] for shard in members],
                [shard.state["exp_avg_sq"] for shard in members],
                [],
                [shard.state["step"] for shard in members],
                foreach=None,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class VRAdamW(VRAdam):
    """:class:`VRAdam` with decoupled weight decay, ``w *= 1 - lr * weight_decay`` (0.01 unless told otherwise)."""

    _base_step = staticmethod(adamw)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.01, **arguments: Any
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **arguments)
