"""Trust ratios of whole layers, as LARS and LAMB have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import ShardLayout


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
