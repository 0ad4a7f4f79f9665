"""Trust ratios of whole layers, as in LARS and LAMB."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.observer import Shard


def of_layers(
    shards: Sequence[Shard],
    table: LayerTable,
    norms: Sequence[Tensor],
    of_group: Callable[[dict[str, Any], Tensor, Tensor], Tensor],
) -> Tensor:
    """Return a number for every layer by its param group. Neighbouring shards of a group are computed at once.

    Args:
        shards: the shards of a call.
        table: their layers.
        norms: two columns, ``(L,)``, norms of each layer.
        of_group: the number of each layer, given a param group and the two norms of its layers.

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
    """Return ``numerator / denominator`` of every layer, 1 where not ``nonzero``, confined to ``trust_clip``.

    Args:
        numerator, denominator, nonzero: ``(layers,)``.
        group: param group with ``trust_clip`` and ``adapt``; without ``adapt`` the ratio is 1, whatever the clip.
    """
    one = torch.ones_like(numerator)
    if not group["adapt"]:
        return one
    ratio = torch.where(nonzero, numerator / torch.where(nonzero, denominator, one), one)
    return ratio if group["trust_clip"] is None else ratio.clamp(*group["trust_clip"])
