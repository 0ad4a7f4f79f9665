"""The kernels that are timed, and the bytes that each must move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.kernels.blocks import BlockTable
from ds_vrgd.kernels.records import AdamNumbers, Columns, MomentumNumbers, RatioNumbers, ShardCall, Tensors
from ds_vrgd.moments import Comparison, ShardLayout
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
        self._numel, self._layers, self._device = layout.numel, len(layout.layers), device
        self._table = BlockTable(
            [[(s.start, s.numel, s.layer, s.first) for s in layout.segments]], self._layers, device
        )

    def flat(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a value for each element."""
        return torch.zeros(self._numel, dtype=dtype, device=self._device)

    def by_layer(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a value for each layer."""
        return torch.ones(self._layers, dtype=dtype, device=self._device)

    def plain(self) -> tuple[Tensors, RatioNumbers]:
        """Return a gradient without a ratio."""
        return Tensors(grad=self.flat(), scale=torch.ones((), device=self._device)), RatioNumbers()

    def moments(self, averages: bool) -> tuple[Tensors, RatioNumbers]:
        """Return the mean of the chunks as gradient, as in fused mode, with its ratio; the average is in bf16."""
        tensors = Tensors(
            scale=torch.ones((), device=self._device),
            total=self.flat(),
            m2=self.flat(),
            average=self.flat(torch.bfloat16) if averages else None,
        )
        return tensors, RatioNumbers(k=float(RANKS), gsnr_eps=1e-6, gamma=0.1, beta3=0.9, rest3=0.1)

    def adam(self, tensors: Tensors, numbers: RatioNumbers, **given: Any) -> ShardCall:
        """Return a gradient with weights and both moments of Adam."""
        tensors = tensors._replace(weights=self.flat(), exp_avg=self.flat(), exp_avg_sq=self.flat())
        rule = AdamNumbers(1e-6, 0.01, 0.1, 0.999, 0.001, 1.0, 1.0)._replace(**given)
        return ShardCall(tensors, numbers, rule, 1)

    def momentum(self, tensors: Tensors, numbers: RatioNumbers) -> ShardCall:
        """Return a gradient with weights and a momentum buffer."""
        tensors = tensors._replace(weights=self.flat(), buffer=self.flat())
        return ShardCall(tensors, numbers, MomentumNumbers(1e-4, 0.01, 0.9))

    def call(self, kernel: str, shard: ShardCall, sums: int, *, trust: bool = False) -> Callable[[], Any]:
        """Return the call of a kernel with so many columns of sums."""
        from ds_vrgd.kernels import update

        launcher = update.Launcher(self._table, [shard])
        partials = update.empty_partials(self._table, sums) if sums else None
        columns = Columns(
            self.by_layer(torch.float64) if shard.tensors.m2 is not None else None, self.by_layer() if trust else None
        )
        return lambda: launcher.launch(getattr(update, kernel), columns, partials)


Make = Callable[[ShardLayout, torch.device], Callable[[], Any]]


def _merge(parts: int) -> Make:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        received = torch.zeros(RANKS, layout.numel, dtype=torch.bfloat16, device=device)
        total, m2 = (torch.zeros(layout.numel, device=device) for _ in range(2))
        return lambda: merge_chunks_(received, total, m2, parts)

    return make


def _compare(ranks: int) -> Make:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        received = torch.randn(ranks, layout.numel, device=device, dtype=torch.bfloat16)
        comparison = Comparison([layer.name for layer in layout.layers], range(ranks), None, ranks)
        runs = [(s.start, s.numel, s.layer, s.first) for s in layout.segments]
        return lambda: comparison.add(received, "shard", lambda: runs)

    return make


def _on_shard(call: Callable[[_Shard], Callable[[], Any]]) -> Make:
    return lambda layout, device: call(_Shard(layout, device))


def _torch_adamw(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
    weights = torch.zeros(layout.numel, device=device)
    weights.grad = torch.zeros_like(weights)
    return torch.optim.AdamW([weights], fused=True).step


#: Bytes: 4 for each fp32 value read or written, 2 for bf16.
KERNELS = (
    Kernel("moments of 2 bf16 chunks, first micro-batch", RANKS * 2 + 8, _merge(0), needs_gpu=False),
    Kernel("moments of 2 bf16 chunks, merged", RANKS * 2 + 16, _merge(1), needs_gpu=False),
    *(Kernel(f"comparison of {ranks} ranks in bf16", ranks * 2, _compare(ranks)) for ranks in (RANKS, 8, 16)),
    # total, m2
    Kernel(
        "sums of the ratio by layer",
        8,
        _on_shard(lambda s: s.call("ratio_sums", ShardCall(*s.moments(averages=False)), 3)),
    ),
    # Read total, m2, weights, two moments, average; write weights, two moments, average.
    Kernel(
        "VRAdamW",
        20 + 2 + 12 + 2,
        _on_shard(lambda s: s.call("adam_step", s.adam(*s.moments(averages=True), lr=1e-4, shrink=1.0), 2)),
    ),
    # The same, but the weights are not written.
    Kernel(
        "VRLAMB, moments and norms",
        20 + 2 + 8 + 2,
        _on_shard(lambda s: s.call("lamb_advance", s.adam(*s.moments(averages=True)), 4)),
    ),
    # Read gradient, weights, two moments; write two moments.
    Kernel("LAMB, moments and norms", 16 + 8, _on_shard(lambda s: s.call("lamb_advance", s.adam(*s.plain()), 2))),
    # Read weights and two moments; write weights.
    Kernel("LAMB, weights", 12 + 4, _on_shard(lambda s: s.call("lamb_apply", s.adam(*s.plain()), 0, trust=True))),
    # total, m2, weights
    Kernel("VRLARS, norms", 12, _on_shard(lambda s: s.call("lars_norms", s.momentum(*s.moments(averages=False)), 4))),
    # Read total, m2, weights, buffer; write weights, buffer.
    Kernel(
        "VRLARS, weights",
        16 + 8,
        _on_shard(lambda s: s.call("momentum_step", s.momentum(*s.moments(averages=False)), 0, trust=True)),
    ),
    Kernel(
        "VRMomentum",
        16 + 8,
        _on_shard(lambda s: s.call("momentum_step", s.momentum(*s.moments(averages=False)), 2)),
    ),
    # Read weights, gradient, two moments; write weights and two moments.
    Kernel("torch fused AdamW", 16 + 12, _torch_adamw, needs_gpu=False),
)
