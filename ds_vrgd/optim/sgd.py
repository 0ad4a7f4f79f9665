"""VR-SGD and VR-Momentum: the ratio in front of ``torch.optim.SGD``'s own step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim.sgd import sgd

from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard, by_group

if TYPE_CHECKING:
    from types import ModuleType

    from ds_vrgd.kernels.records import Source


class VRSGD(VROptimizer):
    """SGD on the variance-reduced gradient, ``theta -= lr * r * gbar`` (equation 10).

    Args:
        params: parameters, or param groups that may override every argument.
        lr: learning rate.
        momentum: decay of the momentum buffer, in [0, 1); the buffer takes ``r * gbar``.
        nesterov: look ahead, as ``torch.optim.SGD`` does; needs a momentum.
        weight_decay: L2 coefficient; ``weight_decay * w`` is added to ``r * gbar``.
        gamma: floor of the ratio, in (0, 1] (equation 9); 1 is ``torch.optim.SGD``, bitwise.
        gsnr_eps: floor of the variance relative to the squared mean.
        reduction: what becomes of DeepSpeed's own reduction of gradients at ZeRO stages 1 to 3. "fused" replaces it,
            "observe" looks on beside it, "auto" replaces it wherever that is exact.
        ranks_per_node: so many consecutive ranks exchange gradients, and only moments travel between such groups. None
            to go by the launcher.
        nonfinite: what to do about a window with a NaN or an infinity in a chunk: "skip" leaves the step out, "error"
            raises FloatingPointError before any weight is updated. Layer, rank and micro-batch are named either way.

    Raises:
        ValueError: an argument out of its range, or ``nesterov`` without momentum.

    Source: the VRGD paper, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
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
                "gamma": gamma,
                "gsnr_eps": gsnr_eps,
            },
            unknown,
            reduction=reduction,
            ranks_per_node=ranks_per_node,
            nonfinite=nonfinite,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group that wants Nesterov without momentum is refused."""
        merged = self.defaults | param_group
        if merged["nesterov"] is True and merged["momentum"] == 0.0:
            raise ValueError("nesterov=True needs momentum > 0, and momentum is 0")
        super().add_param_group(param_group)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, where there is momentum."""
        return ("momentum_buffer",) if group["momentum"] else ()

    def _update(self, shards: Sequence[Shard]) -> None:
        for members in by_group(shards):
            group = members[0].group
            sgd(
                [shard.tensor for shard in members],
                [shard.grad for shard in members],
                [shard.state.get("momentum_buffer") for shard in members],
                has_sparse_grad=False,
                foreach=None,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )

    def _kernel_update(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, sources: Sequence[Source]
    ) -> None:
        partials = room.empty_partials(table.blocks, 2)
        for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
            group = shard.group
            room.momentum_step(
                table.blocks, index, source, shard.tensor, shard.state.get("momentum_buffer"), lr=float(group["lr"]),
                decay=float(group["weight_decay"]), momentum=float(group["momentum"]), nesterov=group["nesterov"],
                partials=partials,
            )  # fmt: skip
        self._counts = list(room.sum_blocks(table.blocks, partials))


class VRMomentum(VRSGD):
    """:class:`VRSGD` with a momentum of 0.9 unless told otherwise."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, momentum: float = 0.9, **arguments: Any) -> None:
        super().__init__(params, lr, momentum=momentum, **arguments)
