"""LAMB and VR-LAMB, with trust ratios of whole layers however they are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.adam import adam_state
from ds_vrgd.optim.arguments import refuse_gsnr
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.shards import Shard
from ds_vrgd.optim.sources import with_average
from ds_vrgd.optim.trust import of_layers, over_shard, trust_ratio

if TYPE_CHECKING:
    from types import ModuleType

    from ds_vrgd.kernels.records import Source


class VRLAMB(VROptimizer):
    """LAMB whose two moments both take ``ghat = phat * gbar``, with phat the debiased running mean of r.

    ``u = mhat / (sqrt(vhat) + eps) + weight_decay * w``; ``w -= lr * |w| / |u| * u``, both norms over the whole layer,
    and their ratio 1 where either is 0. The order of averaging and scaling is our reading of the VRGD paper's section
    4.2; its appendix D, which holds the algorithm, is not available.

    Args:
        params: parameters, or param groups that may override every argument.
        lr: learning rate.
        betas: decay of the first and second moment, each in [0, 1).
        beta3: decay of the running mean of the ratio, in [0, 1).
        eps: added to the root of the second moment, in the gradient's units. Where it is 0 in the weights' dtype (as
            1e-8 is in fp16), an element that never had a gradient becomes NaN, as in ``torch.optim.Adam``.
        weight_decay: decoupled decay, inside the trust ratio.
        gamma: floor of r, in (0, 1] (equation 9); 1 is LAMB.
        gsnr_eps: floor of the variance relative to the squared mean.
        gsnr_dtype: of the running mean of the ratio. "float32" is the weights' own dtype; "bfloat16" halves its memory,
            and is rounded stochastically, without which the mean would stand still.
        bias_correction: debias the two moments.
        trust_clip: bounds ``(lo, hi)`` of the trust ratio, or None.
        adapt: False for a trust ratio of 1; meant for the param group of biases and normalisation weights.
        prenormalize: divide the gradient by its 2-norm over the whole model first, as NVLAMB does.
        reduction: what becomes of DeepSpeed's own reduction of gradients at ZeRO stages 1 to 3. "fused" replaces it,
            "observe" looks on beside it, "auto" replaces it wherever that is exact.
        ranks_per_node: so many consecutive ranks exchange gradients, and only moments travel between such groups. None
            to go by the launcher.
        nonfinite: what to do about a window with a NaN or an infinity in a chunk: "skip" leaves the step out, "error"
            raises FloatingPointError before any weight is updated. Layer, rank and micro-batch are named either way.

    Raises:
        ValueError: an argument out of its range.

    Source: You et al. 2019, "Large Batch Optimization for Deep Learning", algorithm 2; the VRGD paper, section 4.2.
    """

    counts_steps = True
    averages_ratio = True
    has_plain_kernel = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        beta3: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        gamma: float = 0.1,
        gsnr_eps: float = 1e-6,
        gsnr_dtype: str | torch.dtype = "float32",
        bias_correction: bool = True,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool = True,
        prenormalize: bool = False,
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
                "bias_correction": bias_correction,
                "trust_clip": trust_clip,
                "adapt": adapt,
                "prenormalize": prenormalize,
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
        updates = [self._direction(shard) for shard in shards]
        norms = self.layer_norms(shards, [shard.tensor for shard in shards], updates)
        table = self.table(shards)
        rates = table.split(of_layers(shards, table, norms, self._rates))
        for shard, update, layout, rate in zip(shards, updates, table.layouts, rates, strict=True):
            shard.tensor.sub_(over_shard(layout, rate, shard.tensor) * update)

    @staticmethod
    def _rates(group: dict[str, Any], w: Tensor, u: Tensor) -> Tensor:
        """Learning rate times trust ratio of layers, given the norms of their weights and updates."""
        return trust_ratio(w, u, (w > 0) & (u > 0), group).mul_(group["lr"])

    def _prescale(self, shards: Sequence[Shard]) -> None:
        """Divide by the gradient's norm over the whole model, where the group says so."""
        chosen = [shard for shard in shards if shard.group["prenormalize"]]
        if chosen:
            norm = self.observer.grad_norm([shard.tensor for shard in shards])
            factor = torch.where(norm > 0, 1.0 / norm, torch.ones_like(norm))
            for shard in chosen:
                own = factor.to(shard.grad.dtype)
                shard.scale = own if shard.scale is None else shard.scale * own

    def _kernel_update(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, sources: Sequence[Source]
    ) -> None:
        partials = room.empty_partials(table.blocks, 4)
        states = []
        for index, (shard, source) in enumerate(zip(shards, sources, strict=True)):
            shard.state["step"] += 1
            averaged, begins = (source, False) if source.m2 is None else with_average(shard, source)
            states.append(adam_state(shard))
            seed = gsnr.rounding_seed(int(shard.state["step"]))
            room.lamb_advance(table.blocks, index, averaged, states[-1], partials, seed=seed, begins=begins)
        reduces = sources[0].m2 is not None
        weights, updates, *self._counts = room.sum_blocks(table.blocks, partials if reduces else partials[:2])
        norms = [total.sqrt() for total in self.sum_over_ranks(table, [weights, updates])]
        rates = of_layers(shards, table, norms, self._rates).float()
        for index, state in enumerate(states):
            room.lamb_apply(table.blocks, index, state, rates)

    @staticmethod
    def _direction(shard: Shard) -> Tensor:
        """Advance the moments; returns ``u``."""
        group, state = shard.group, shard.state
        beta1, beta2 = group["betas"]
        state["step"] += 1
        mean = state["exp_avg"].lerp_(shard.grad, 1.0 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(shard.grad, shard.grad, value=1.0 - beta2)
        if group["bias_correction"]:
            steps = int(state["step"])
            mean, square = mean / (1.0 - beta1**steps), square / (1.0 - beta2**steps)
        update: Tensor = mean / square.sqrt().add_(group["eps"])
        return update.add_(shard.tensor, alpha=group["weight_decay"])


class LAMB(VRLAMB):
    """LAMB without variance reduction: :class:`VRLAMB` at ``gamma=1``, exact under every ZeRO stage.

    Takes the arguments of :class:`VRLAMB` but those of GSNR: ``beta3``, ``gamma``, ``gsnr_eps``, ``gsnr_dtype``,
    ``reduction``, ``ranks_per_node``, ``nonfinite``.
    """

    reduces_variance = False

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **arguments: Any) -> None:
        refuse_gsnr(type(self).__name__, arguments)
        super().__init__(params, lr, gamma=1.0, **arguments)
