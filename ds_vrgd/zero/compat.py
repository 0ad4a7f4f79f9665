"""Where the supported releases of DeepSpeed differ: what is missing in older ones, and what stands in for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from ds_vrgd.zero.versions import FUSED, is_among

Engine = Any

#: Holds the gradient of a flat shard; only where fused mode may be chosen.
GradPartitionBufferGroup: Any = getattr(stage_1_and_2, "GradPartitionBufferGroup", None)


def setting(engine: Engine, method: str) -> Any:
    """What the engine's method says about a setting; None in a release that does not have that setting yet."""
    ask = getattr(engine, method, None)
    return None if ask is None else ask()


def end_to_end(params: Sequence[Tensor]) -> list[int]:
    """Where each parameter begins in a flat buffer without gaps, in elements."""
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += param.numel()
    return offsets


def flat_offsets(wrapper: Any) -> list[list[int]]:
    """Where each parameter begins in the flat buffer of its group at stages 1 and 2, in elements.

    Before 0.19.7 there were no gaps between them, and no list.
    """
    offsets: list[list[int]] | None = getattr(wrapper, "round_robin_bit16_offsets", None)
    return offsets if offsets is not None else [end_to_end(group) for group in wrapper.round_robin_bit16_groups]


def too_old_to_fuse(version: str = deepspeed.__version__) -> str | None:
    """Why this release's reduction is not replaced, whatever the configuration; None where it may be."""
    if is_among(version, FUSED):
        return None
    return f"DeepSpeed {version}: the reduction can be replaced in deepspeed{FUSED}. Install that"
