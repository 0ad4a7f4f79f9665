"""Trust ratios of whole layers, as in LARS and LAMB."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
