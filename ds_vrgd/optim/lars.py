"""LARS and VR-LARS, with trust ratios of whole layers however they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.arguments import refuse_gsnr
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard
from ds_vrgd.optim.trust import of_layers, over_shard, trust_ratio

if TYPE_CHECKING:
    from types import ModuleType

    from ds_vrgd.kernels.records import Source


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
        reduction: what becomes of DeepSpeed's own reduction of gradients at ZeRO stages 1 to 3. "fused" replaces it,
            "observe" looks on beside it, "auto" replaces it wherever that is exact.
        ranks_per_node: so many consecutive ranks exchange gradients, and only moments travel between such groups. None
            to go by the launcher.
        nonfinite: what to do about a window with a NaN or an infinity in a chunk: "skip" leaves the step out, "error"
            raises FloatingPointError before any weight is updated. Layer, rank and micro-batch are named either way.

    Raises:
        ValueError: an argument out of its range.

    Source: You, Gitman, Ginsburg 2017, "Large Batch Training of Convolutional Networks", algorithm 1; the VRGD paper,
    section 4.
    """

    has_plain_kernel = True

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
        reduction: str = "auto",
        ranks_per_node: int | None = None,
        nonfinite: str = "skip",
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
            reduction=reduction,
            ranks_per_node=ranks_per_node,
            nonfinite=nonfinite,
        )

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, also at momentum 0, where it holds the last step."""
        return ("momentum_buffer",)

    def _update(self, shards: Sequence[Shard]) -> None:
        norms = self.layer_norms(shards, [shard.tensor for shard in shards], [shard.grad for shard in shards])
        table = self.table(shards)
        ratios = table.split(of_layers(shards, table, norms, self._trust))
        for shard, layout, ratio in zip(shards, table.layouts, ratios, strict=True):
            group = shard.group
            step = shard.grad.add(shard.tensor, alpha=group["weight_decay"]).mul_(
                over_shard(layout, ratio, shard.tensor)
            )
            buffer = shard.state["momentum_buffer"].mul_(group["momentum"]).add_(step)
            if group["nesterov"]:
                buffer = step.add_(buffer, alpha=group["momentum"])
            shard.tensor.sub_(buffer, alpha=group["lr"])

    @staticmethod
    def _trust(group: dict[str, Any], w: Tensor, g: Tensor) -> Tensor:
        """Trust ratios of layers, given the norms of their weights and gradients."""
        denominator = g + group["weight_decay"] * w + group["eps"]
        return trust_ratio(group["trust_coefficient"] * w, denominator, (w > 0) & (g > 0), group)

    def _kernel_update(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, sources: Sequence[Source]
    ) -> None:
        partials = room.empty_partials(table.blocks, 4)
        for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
            room.lars_norms(table.blocks, index, source, shard.tensor, partials)
        reduces = sources[0].m2 is not None
        weights, grads, *self._counts = room.sum_blocks(table.blocks, partials if reduces else partials[:2])
        norms = [total.sqrt() for total in self.sum_over_ranks(table, [weights, grads])]
        trust = of_layers(shards, table, norms, self._trust).float()
        for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
            group = shard.group
            room.momentum_step(
                table.blocks, index, source, shard.tensor, shard.state["momentum_buffer"], lr=float(group["lr"]),
                decay=float(group["weight_decay"]), momentum=float(group["momentum"]), nesterov=group["nesterov"],
                trust=trust,
            )  # fmt: skip


class LARS(VRLARS):
    """LARS without variance reduction: :class:`VRLARS` at ``gamma=1``, exact under every ZeRO stage.

    Takes the arguments of :class:`VRLARS` but those of GSNR: ``gamma``, ``gsnr_eps``, ``reduction``,
    ``ranks_per_node``, ``nonfinite``.
    """

    reduces_variance = False

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **arguments: Any) -> None:
        refuse_gsnr(type(self).__name__, arguments)
        super().__init__(params, lr, gamma=1.0, **arguments)
