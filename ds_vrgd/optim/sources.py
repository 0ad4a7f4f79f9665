"""From shards to what the kernels read: the gradient of a step, and what its ratio is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ds_vrgd.kernels.records import Source
from ds_vrgd.moments import LayerTable, Moments
from ds_vrgd.optim.average import KEY, begin_average
from ds_vrgd.optim.shards import Shard

if TYPE_CHECKING:
    from types import ModuleType


def sources_with_sums(
    room: ModuleType, shards: Sequence[Shard], table: LayerTable, moments: Sequence[Moments], k: int
) -> tuple[list[Source], Tensor]:
    """What the update kernels read of every shard, the layers' means still missing, and this rank's part of these.

    Args:
        room: the kernels.
        shards: of the groups with GSNR, fit for the kernels.
        table: their layers.
        moments: theirs.
        k: number of chunks of a layer whose micro-batches are chunks of their own.

    Returns:
        One source a shard, and ``(3, L)`` in SUM_DTYPE: sums of the raw ratio, of the squared mean gradient, of m2.
    """
    sources = []
    partials = room.empty_partials(table.blocks, 3)
    for index, (shard, of_shard) in enumerate(zip(shards, moments, strict=True)):
        beta3, steps = shard.group.get("beta3", 0.0), int(shard.state.get("step", 0)) + 1
        is_total = shard.grad.data_ptr() == of_shard.total.data_ptr()
        source = Source(
            None if is_total else shard.grad, shard.scale, of_shard.total, of_shard.m2,
            k=float(k // table.layouts[index].share), parts=float(of_shard.parts),
            gsnr_eps=float(shard.group["gsnr_eps"]),
            gamma=shard.group["gamma"], beta3=float(beta3), rest3=1.0 - beta3, debias=1.0 / (1.0 - beta3**steps),
            earlier=1.0 - beta3 ** (steps - 1),
        )  # fmt: skip
        room.ratio_sums(table.blocks, index, source, partials)
        sources.append(source)
    return sources, room.sum_blocks(table.blocks, partials)


def plain_sources(shards: Sequence[Shard]) -> list[Source]:
    """What the update kernels read of shards of groups without GSNR."""
    return [Source(shard.grad, shard.scale) for shard in shards]


def with_average(shard: Shard, source: Source) -> tuple[Source, bool]:
    """The source with its running mean of the ratio, and whether that begins in this step."""
    begins = begin_average(shard)
    return source._replace(average=shard.state[KEY]), begins
