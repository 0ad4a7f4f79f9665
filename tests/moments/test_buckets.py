"""How gradients lie in a send buffer."""

import itertools

import pytest
import torch

from ds_vrgd.moments.buckets import ALIGNMENT, Bucket
from ds_vrgd.moments.route import Plan, Route

RANKS = 3


@pytest.mark.parametrize("share", [1, RANKS])
def test_regions_begin_where_nccl_is_fast_and_end_in_zeros(share: int) -> None:
    """Odd sizes; every element once, each region at a multiple of the alignment, zeros in the padding."""
    shard = torch.empty(100)
    runs = {"a": ((0, 7),), "b": ((0, 5), (1, 70)), "c": ((2, 1),)}
    params = {name: torch.empty(sum(numel for _, numel in run)) for name, run in runs.items()}
    routes = [
        Route(params[name], name, params[name].numel(), run, shard, 0, place=place)
        for place, (name, run) in enumerate(runs.items())
    ]
    bucket = Bucket(routes, Plan(None, RANKS // share, 0, 0, tuple(range(RANKS))))
    assert bucket.regions == [ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT]
    starts = [0, *itertools.accumulate(bucket.regions)]
    assert bucket.numel == starts[-1]
    assert bucket.splits == [sum(bucket.regions[i : i + share]) for i in range(0, RANKS, share)]

    data = torch.full((bucket.numel,), torch.nan)
    views = bucket.views(data)
    views.copy({params["a"]: torch.full((7,), 1.0), params["c"]: torch.full((1,), 3.0)})
    views.copy({params["b"]: torch.arange(75.0) + 100})
    views.clear([], tails=True)
    owned = [[1.0] * 7 + [100.0 + i for i in range(5)], [105.0 + i for i in range(70)], [3.0]]
    for start, width, values in zip(starts, bucket.regions, owned, strict=False):
        assert data[start : start + width].tolist() == values + [0.0] * (width - len(values))
