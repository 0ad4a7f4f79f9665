"""The kernels that are timed, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import ShardLayout
from ds_vrgd.moments.chan import merge_chunks_

# Chunks of a micro-batch, and so shards of a model.
RANKS = 2


@dataclass(frozen=True)
class Kernel:
    """A kernel on a shard.

    Attributes:
        name: what it does.
        bytes_per_element: read and written for each element of the shard, every tensor once.
        make: given the shard's layout and the device, the call.
        needs_gpu: whether there is nothing to time without one.
    """

    name: str
    bytes_per_element: int
    make: Callable[[ShardLayout, torch.device], Callable[[], Any]]
    needs_gpu: bool = True


class _Shard:
    """Tensors of a step over one shard, made when they are asked for."""

    def __init__(self, layout: ShardLayout, device: torch.device) -> None:
        from ds_vrgd.kernels.blocks import BlockTable

        self._numel, self._layers, self._device = layout.numel, len(layout.layers), device
        self.table = BlockTable([[(s.start, s.numel, s.layer, s.first) for s in layout.segments]], self._layers, device)

    def flat(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """One value an element."""
        return torch.zeros(self._numel, dtype=dtype, device=self._device)

    def by_layer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """One value a layer."""
        return torch.ones(self._layers, dtype=dtype, device=self._device)

    def partials(self, columns: int) -> Tensor:
        """Where a kernel leaves its sums."""
        from ds_vrgd.kernels.shared import empty_partials

        return empty_partials(self.table, columns)

    def plain(self) -> Any:
        """A gradient without a ratio."""
        from ds_vrgd.kernels.records import Source

        return Source(self.flat(), scale=torch.ones((), device=self._device))

    def moments(self, averages: bool) -> Any:
        """The mean of the chunks as gradient, as fused mode has it; the average of the ratio in bf16."""
        from ds_vrgd.kernels.records import Source

        return Source(
            None,
            scale=torch.ones((), device=self._device),
            total=self.flat(),
            m2=self.flat(),
            means=self.by_layer(torch.float64),
            average=self.flat(torch.bfloat16) if averages else None,
            k=float(RANKS),
            gsnr_eps=1e-6,
            gamma=0.1,
            beta3=0.9,
            rest3=0.1,
        )

    def adam(self) -> Any:
        """Weights and both moments."""
        from ds_vrgd.kernels.records import AdamState

        return AdamState(self.flat(), self.flat(), self.flat(), 1e-6, 0.01, 0.1, 0.999, 0.001, 1.0, 1.0)


def _merge(parts: int) -> Callable[[ShardLayout, torch.device], Callable[[], Any]]:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        received = torch.zeros(RANKS, layout.numel, dtype=torch.bfloat16, device=device)
        total, m2 = (torch.zeros(layout.numel, device=device) for _ in range(2))
        return lambda: merge_chunks_(received, total, m2, parts)

    return make


def _ratio_sums(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    from ds_vrgd.kernels.ratio import ratio_sums

    shard = _Shard(layout, device)
    source, partials = shard.moments(averages=False), shard.partials(3)
    return lambda: ratio_sums(shard.table, 0, source, partials)


def _adam(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    from ds_vrgd.kernels.adam import adam_step

    shard = _Shard(layout, device)
    source, state, partials = shard.moments(averages=True), shard.adam(), shard.partials(2)
    return lambda: adam_step(
        shard.table, 0, source, state, partials, lr=1e-4, shrink=1.0, seed=1, decoupled=True, begins=False
    )


def _lamb_moments(with_ratio: bool) -> Callable[[ShardLayout, torch.device], Callable[[], Any]]:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        from ds_vrgd.kernels.lamb import lamb_advance

        shard = _Shard(layout, device)
        source = shard.moments(averages=True) if with_ratio else shard.plain()
        state, partials = shard.adam(), shard.partials(4)
        return lambda: lamb_advance(shard.table, 0, source, state, partials, seed=1, begins=False)

    return make


def _lamb_weights(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    from ds_vrgd.kernels.lamb import lamb_apply

    shard = _Shard(layout, device)
    state, rates = shard.adam(), shard.by_layer()
    return lambda: lamb_apply(shard.table, 0, state, rates)


def _lars_norms(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    from ds_vrgd.kernels.momentum import lars_norms

    shard = _Shard(layout, device)
    source, weights, partials = shard.moments(averages=False), shard.flat(), shard.partials(4)
    return lambda: lars_norms(shard.table, 0, source, weights, partials)


def _momentum(is_lars: bool) -> Callable[[ShardLayout, torch.device], Callable[[], Any]]:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        from ds_vrgd.kernels.momentum import momentum_step

        shard = _Shard(layout, device)
        source, weights, buffer = shard.moments(averages=False), shard.flat(), shard.flat()
        # LARS has counted the clamped elements with its norms.
        trust, partials = (shard.by_layer(), None) if is_lars else (None, shard.partials(2))
        return lambda: momentum_step(
            shard.table, 0, source, weights, buffer,
            lr=1e-4, decay=0.01, momentum=0.9, nesterov=False, trust=trust, partials=partials,
        )  # fmt: skip

    return make


def _torch_adamw(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    weights = torch.zeros(layout.numel, device=device)
    weights.grad = torch.zeros_like(weights)
    return torch.optim.AdamW([weights], fused=True).step


#: Bytes: 4 for each fp32 value read or written, 2 for bf16.
KERNELS = (
    Kernel("moments of 2 bf16 chunks, first micro-batch", RANKS * 2 + 8, _merge(0), needs_gpu=False),
    Kernel("moments of 2 bf16 chunks, merged", RANKS * 2 + 16, _merge(1), needs_gpu=False),
    # total, m2
    Kernel("sums of the ratio by layer", 8, _ratio_sums),
    # Read total, m2, weights, two moments, average; write weights, two moments, average.
    Kernel("VRAdamW", 20 + 2 + 12 + 2, _adam),
    # The same, but the weights are not written.
    Kernel("VRLAMB, moments and norms", 20 + 2 + 8 + 2, _lamb_moments(True)),
    # Read gradient, weights, two moments; write two moments.
    Kernel("LAMB, moments and norms", 16 + 8, _lamb_moments(False)),
    # Read weights and two moments; write weights.
    Kernel("LAMB, weights", 12 + 4, _lamb_weights),
    # total, m2, weights
    Kernel("VRLARS, norms", 12, _lars_norms),
    # Read total, m2, weights, buffer; write weights, buffer.
    Kernel("VRLARS, weights", 16 + 8, _momentum(True)),
    Kernel("VRMomentum", 16 + 8, _momentum(False)),
    # Read weights, gradient, two moments; write weights and two moments.
    Kernel("torch fused AdamW", 16 + 12, _torch_adamw, needs_gpu=False),
)
