"""Is the gradient that ``step()`` was handed the mean of the chunks that were observed?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE, LayerTable, Moments, Ranks

# Cosine between the mean of the chunks and the gradient that step() is handed. Clipping leaves it at 1 and rounding to
# bf16 above 0.999; a model that no engine and no DDP reduces has about 1/sqrt(ranks) where noise dominates.
SAME_DIRECTION = 0.9


def verify_direction(table: LayerTable, ranks: Ranks, handed: Sequence[Tensor], moments: Sequence[Moments]) -> None:
    """Compare the directions of the two. A collective.

    Args:
        table: layers of the shards.
        ranks: those that step together; each layer counts as often as it is held.
        handed: gradient of every shard.
        moments: of every shard.

    Raises:
        RuntimeError: they differ, on all ranks.
    """
    sums = [torch.zeros(3, dtype=SUM_DTYPE, device=handed[0].device)]
    for layout, given, of_shard in zip(table.layouts, handed, moments, strict=True):
        mean = of_shard.total  # a positive factor does not turn it
        if given.data_ptr() == mean.data_ptr():
            continue  # fused mode hands over the very same memory
        for segment in layout.segments:
            run = slice(segment.start, segment.start + segment.numel)
            a, b = given.flatten()[run].to(SUM_DTYPE), mean[run].to(SUM_DTYPE)
            sums.append(torch.stack([a @ b, a @ a, b @ b]))
    product, given_square, mean_square = ranks.sum_over_everyone(torch.stack(sums).sum(0)).tolist()
    norms = math.sqrt(given_square * mean_square)
    if norms > 0 and product < SAME_DIRECTION * norms:
        raise RuntimeError(
            f"the gradient handed to step() is not the mean of the chunks that were observed (cosine "
            f"{product / norms:.3f}). Under torch.distributed the model must be wrapped in DistributedDataParallel "
            "or a DeepSpeed engine, and every backward pass must accumulate into .grad."
        )
