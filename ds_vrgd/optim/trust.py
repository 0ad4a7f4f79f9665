"""Trust ratios of whole layers, as LARS and LAMB have them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import LayerTable, ShardLayout
from ds_vrgd.optim.shards import Shard


def of_layers(
    shards: Sequence[Shard],
    table: LayerTable,
    norms: Sequence[Tensor],
    of_group: Callable[[dict[str, Any], Tensor, Tensor], Tensor],
) -> Tensor:
    """A number for every layer by its param group, those of neighbouring shards at once: a model may have hundreds.

    Args:
        shards: with ``table``, their layers.
        norms: two columns, ``(L,)``, norms of each layer.
        of_group: from a param group and the part of both columns that is its layers' to a column as long.

    Returns:
        ``(L,)``, of the norms' dtype.
    """
    columns, first = [], 0
    for _, run in itertools.groupby(zip(shards, table.layouts, strict=True), lambda pair: id(pair[0].group)):
        neighbours, layouts = zip(*run, strict=True)
        end = first + sum(len(layout.layers) for layout in layouts)
        columns.append(of_group(neighbours[0].group, *(norm[first:end] for norm in norms)))
        first = end
    return torch.cat(columns)


def trust_ratio(numerator: Tensor, denominator: Tensor, nonzero: Tensor, group: dict[str, Any]) -> Tensor:
    """``numerator / denominator`` of every layer, 1 where not ``nonzero``, confined to the group's ``trust_clip``.

    Args:
        numerator, denominator, nonzero: ``(layers,)``.
        group: param group; where its ``adapt`` is false the ratio is 1, whatever ``trust_clip`` says.
    """
    one = torch.ones_like(numerator)
    if not group["adapt"]:
        return one
    ratio = torch.where(nonzero, numerator / torch.where(nonzero, denominator, one), one)
    return ratio if group["trust_clip"] is None else ratio.clamp(*group["trust_clip"])


def over_shard(layout: ShardLayout, values: Tensor, tensor: Tensor) -> Tensor:
    """One value a layer, laid over a shard's elements: broadcastable to ``tensor``, and of its dtype."""
    spread = layout.spread(values.to(tensor.dtype))
    return spread.view_as(tensor) if spread.numel() == tensor.numel() else spread
