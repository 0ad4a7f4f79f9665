"""The running mean of the ratio over the steps: ``state["exp_avg_gsnr"]``."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.moments import ShardLayout
from ds_vrgd.optim.shards import Shard

KEY = "exp_avg_gsnr"


def dtype_of_average(shard: Shard) -> torch.dtype:
    """What the group's ``gsnr_dtype`` says: bf16, or the weights' own dtype."""
    halved = str(shard.group["gsnr_dtype"]).endswith("bfloat16")
    return torch.bfloat16 if halved else shard.tensor.dtype


def begin_average(shard: Shard) -> bool:
    """Make room for an average that has none, uninitialised; returns whether it had none."""
    begins = KEY not in shard.state
    if begins:
        shard.state[KEY] = torch.empty_like(shard.tensor, dtype=dtype_of_average(shard))
    return begins


def averaged(shard: Shard, layout: ShardLayout, ratio: Tensor) -> Tensor:
    """Debiased running mean of the ratio over the steps, in the units of the ratio.

    An average that begins late (a checkpoint of the base optimizer brought ``step`` but no average) begins as if
    every earlier ratio had equalled the first, which keeps its debiasing exact.

    Args:
        shard: of the weights; its state's ``step`` still counts the steps before this one.
        layout: of the shard.
        ratio: of this step, in the shape of the weights, fp32 or wider.
    """
    beta3: float = shard.group["beta3"]
    steps = int(shard.state["step"]) + 1
    begins = begin_average(shard)
    kept = shard.state[KEY]
    before = ratio * (1.0 - beta3 ** (steps - 1)) if begins else kept.to(ratio.dtype)
    average = (before * beta3).add_(ratio, alpha=1.0 - beta3)
    if kept.dtype == torch.bfloat16:
        places = layout.places(average.device)
        rounded = gsnr.round_stochastically(average.flatten().float(), places, gsnr.rounding_seed(steps))
        kept.copy_(rounded.view_as(average))
    else:
        kept.copy_(average)
    debiased: Tensor = average / (1.0 - beta3**steps)
    return debiased
