"""The order of gradients and padding in a send buffer."""

import itertools

import pytest
import torch

from ds_vrgd.moments.buckets import ALIGNMENT, Bucket, Buffer, Route, cut_into_buckets
from ds_vrgd.moments.groups import NodeGroups

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
    bucket = Bucket(routes, NodeGroups(None, None, share, RANKS // share, 0))
    assert bucket.regions == [ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT]
    starts = [0, *itertools.accumulate(bucket.regions)]
    assert bucket.numel == starts[-1]
    assert bucket.splits == [sum(bucket.regions[i : i + share]) for i in range(0, RANKS, share)]

    data = torch.full((bucket.numel,), torch.nan)
    buffer = Buffer(data)
    buffer.copy(bucket, {params["a"]: torch.full((7,), 1.0), params["c"]: torch.full((1,), 3.0)})
    buffer.copy(bucket, {params["b"]: torch.arange(75.0) + 100})
    buffer.complete(bucket, [])
    owned = [[1.0] * 7 + [100.0 + i for i in range(5)], [105.0 + i for i in range(70)], [3.0]]
    for start, width, values in zip(starts, bucket.regions, owned, strict=False):
        assert data[start : start + width].tolist() == values + [0.0] * (width - len(values))


def test_a_gradient_travels_in_the_dtype_of_its_route() -> None:
    """A gradient wider than its parameter keeps its bits, in a bucket of its own."""
    groups = NodeGroups(None, None, 1, 1, 0)
    params = [torch.empty(3, dtype=torch.bfloat16) for _ in range(3)]
    routes = [
        Route(param, str(place), 3, ((0, 3),), torch.empty(9), 3 * place, place=place, dtype=dtype)
        for place, (param, dtype) in enumerate(zip(params, (None, torch.float32, None), strict=True))
    ]
    buckets = cut_into_buckets(routes, groups, 1000)
    assert [(b.dtype, [r.name for r in b.routes]) for b in buckets] == [
        (torch.bfloat16, ["0", "2"]),
        (torch.float32, ["1"]),
    ]
    data = torch.zeros(buckets[1].numel, dtype=buckets[1].dtype)
    Buffer(data).copy(buckets[1], {params[1]: torch.full((3,), 257.0)})  # no number in bf16
    assert data[:3].tolist() == [257.0] * 3
