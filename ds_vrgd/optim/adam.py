"""VR-Adam and VR-AdamW: the averaged ratio in front of ``torch.optim``'s own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ds_vrgd import gsnr
from ds_vrgd.kernels.records import AdamState
from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard, by_group
from ds_vrgd.optim.sources import with_average

if TYPE_CHECKING:
    from types import ModuleType

    from ds_vrgd.kernels.records import Source


def adam_state(shard: Shard) -> AdamState:
    """What the kernels of Adam and LAMB read of a shard, for the step that its state has been counted up to."""
    group, state = shard.group, shard.state
    beta1, beta2 = group["betas"]
    steps = int(state["step"])
    debias = group.get("bias_correction", True)
    return AdamState(
        shard.tensor, state["exp_avg"], state["exp_avg_sq"], float(group["eps"]), float(group["weight_decay"]),
        1.0 - beta1, beta2, 1.0 - beta2,
        1.0 / (1.0 - beta1**steps) if debias else 1.0, (1.0 - beta2**steps) ** -0.5 if debias else 1.0,
    )  # fmt: skip


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
        gsnr_dtype: of the running mean of the ratio. "float32" is the weights' own dtype; "bfloat16" halves its memory,
            and is rounded stochastically, without which the mean would stand still.
        reduction: what becomes of DeepSpeed's own reduction of gradients at ZeRO stages 1 to 3. "fused" replaces it,
            "observe" looks on beside it, "auto" replaces it wherever that is exact.
        ranks_per_node: so many consecutive ranks exchange gradients, and only moments travel between such groups. None
            to go by the launcher.
        nonfinite: what to do about a window with a NaN or an infinity in a chunk: "skip" leaves the step out, "error"
            raises FloatingPointError before any weight is updated. Layer, rank and micro-batch are named either way.

    Raises:
        ValueError: an argument out of its range.
    """

    counts_steps = True
    averages_ratio = True
    decoupled_decay: ClassVar[bool] = False
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
        gsnr_dtype: str | torch.dtype = "float32",
        reduction: str = "auto",
        ranks_per_node: int | None = None,
        nonfinite: str = "skip",
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
                "gsnr_dtype": gsnr_dtype,
            },
            unknown,
            reduction=reduction,
            ranks_per_node=ranks_per_node,
            nonfinite=nonfinite,
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

    def _kernel_update(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, sources: Sequence[Source]
    ) -> None:
        partials = room.empty_partials(table.blocks, 2)
        for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
            shard.state["step"] += 1
            lr = float(shard.group["lr"])
            averaged, begins = with_average(shard, source)
            room.adam_step(
                table.blocks, index, averaged, adam_state(shard), partials,
                lr=lr, shrink=1.0 - lr * shard.group["weight_decay"],
                seed=gsnr.rounding_seed(int(shard.state["step"])), decoupled=self.decoupled_decay, begins=begins,
            )  # fmt: skip
        self._counts = list(room.sum_blocks(table.blocks, partials))


class VRAdamW(VRAdam):
    """:class:`VRAdam` with decoupled weight decay, ``w *= 1 - lr * weight_decay`` (0.01 unless told otherwise)."""

    decoupled_decay = True
    _base_step = staticmethod(adamw)

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.01, **arguments: Any
    ) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **arguments)
