"""The collectives of which a reduction of gradients can consist, each on one model's gradients.

Rows with the name of a collective move one buffer in one call, at three sizes, so that latency and bandwidth can be
told apart (``benchmarks.model``). ``all-to-all and moments`` adds the mean and centred sum of squares that the owner of
a shard forms of what it receives; ``reduce-scatter of fp32 squares`` includes the squaring. ``exchange and moments`` is
this package's own path: every gradient is copied into its bucket, the buckets travel, and the moments are formed as
they arrive; with the ownership of stages 1 and 2, with ``round_robin_gradients``, and with that of stage 3. What the
host does for it, some ms, is done before the device begins, as a backward pass hides it in training.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bert import NETWORKS
from benchmarks.ranks import Rank
from benchmarks.record import Record
from benchmarks.shards import DEALT, FLAT, SLICED, exchange
from benchmarks.timing import Clock, Spread, repeat, repeat_with_host_ahead
from benchmarks.training import free
from ds_vrgd.moments.buckets import ALIGNMENT
from ds_vrgd.moments.chan import merge_chunks_

REPETITIONS = 25
WARMUP = 8
WIRE = torch.bfloat16
#: The model's size is divided by these.
FRACTIONS = (1, 16, 256)
SEVERAL_SIZES = ("all-reduce", "reduce-scatter", "all-to-all")

EXCHANGES = {
    "exchange and moments": FLAT,
    "exchange and moments, round robin": DEALT,
    "exchange and moments, stage 3": SLICED,
}


def _all_reduce(elements: int, rank: Rank) -> Callable[[], Any]:
    buffer = torch.zeros(elements, dtype=WIRE, device=rank.device)
    return lambda: dist.all_reduce(buffer)


def _reduce_scatter(elements: int, rank: Rank, dtype: torch.dtype = WIRE) -> Callable[[], Any]:
    own = elements // rank.count
    source = torch.zeros(own * rank.count, dtype=dtype, device=rank.device)
    target = torch.zeros(own, dtype=dtype, device=rank.device)
    return lambda: dist.reduce_scatter_tensor(target, source)


def _reduce_scatter_of_squares(elements: int, rank: Rank) -> Callable[[], Any]:
    gradient = torch.zeros(elements // rank.count * rank.count, dtype=WIRE, device=rank.device)
    squares = torch.zeros(gradient.numel(), dtype=torch.float32, device=rank.device)
    target = torch.zeros(elements // rank.count, dtype=torch.float32, device=rank.device)

    def run() -> None:
        squares.copy_(gradient).square_()
        dist.reduce_scatter_tensor(target, squares)

    return run


def _all_to_all(elements: int, rank: Rank) -> Callable[[], Any]:
    source = torch.zeros(elements // rank.count * rank.count, dtype=WIRE, device=rank.device)
    target: Tensor = torch.zeros_like(source)
    return lambda: dist.all_to_all_single(target, source)


def _all_to_all_and_moments(elements: int, rank: Rank) -> Callable[[], Any]:
    source = torch.zeros(elements // rank.count * rank.count, dtype=WIRE, device=rank.device)
    received = torch.zeros_like(source)
    total, m2 = (torch.zeros(elements // rank.count, device=rank.device) for _ in range(2))

    def run() -> None:
        dist.all_to_all_single(received, source)
        merge_chunks_(received.view(rank.count, -1), total, m2, 0)

    return run


#: Names as ``benchmarks.model`` knows them, with what makes the call.
COLLECTIVES: dict[str, Callable[[int, Rank], Callable[[], Any]]] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "all-to-all and moments": _all_to_all_and_moments,
    "reduce-scatter of fp32 squares": _reduce_scatter_of_squares,
}


def run(rank: Rank, record: Record, model: str) -> None:
    """Time all of them on a model's gradients; each is recorded and logged as it is done."""
    parameters = [param for _, param in NETWORKS[model].parameters()]
    elements = sum(param.numel() for param in parameters)
    for name, make in COLLECTIVES.items():
        # NCCL is up to twice as slow where a rank's part begins at an odd address, as it would for BERT-large on two.
        parts = [elements // fraction // rank.count for fraction in FRACTIONS]
        sizes = [max(part // ALIGNMENT, 1) * ALIGNMENT * rank.count for part in parts]
        for size in sizes if name in SEVERAL_SIZES else sizes[:1]:
            _time(rank, record, name, size, partial(make, size, rank), repeat)
    flag = torch.zeros(1, device=rank.device)
    ahead = partial(repeat_with_host_ahead, align=lambda: dist.all_reduce(flag))
    for name, ownership in EXCHANGES.items():
        make_exchange = partial(exchange, NETWORKS[model], ownership, rank, WIRE)
        _time(rank, record, name, elements, make_exchange, ahead)


def _time(
    rank: Rank,
    record: Record,
    name: str,
    elements: int,
    make: Callable[[], Callable[[], Any]],
    repeatedly: Callable[..., list[float]],
) -> None:
    free(rank.device)
    seconds = Spread.of(rank.slowest(repeatedly(make(), Clock(rank.device), REPETITIONS, WARMUP)))
    record.add("collectives", {"name": name, "elements": elements, "ranks": rank.count, "seconds": seconds.to_json()})
    rank.log(
        f"{name}, {elements:,} elements: {seconds.median * 1e3:.3f} ms "
        f"({seconds.p10 * 1e3:.3f} to {seconds.p90 * 1e3:.3f})"
    )
