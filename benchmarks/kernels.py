"""Each kernel against its floor: the bytes that it must move, at the bandwidth of a large copy on the same card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bert import NETWORKS
from benchmarks.ranks import Rank
from benchmarks.record import Record
from benchmarks.shards import layers_of, shard_layout
from benchmarks.timing import Clock, Spread, repeat
from benchmarks.training import free
from ds_vrgd.moments import ShardLayout
from ds_vrgd.moments.chan import merge_chunks_

REPETITIONS = 25
WARMUP = 8
COPY_BYTES = {"cuda": 2**31, "cpu": 2**20}
# The shard is one of two, whatever the number of ranks: only one of them works.
RANKS = 2


@dataclass(frozen=True)
class Kernel:
    """A kernel on a shard.

    Attributes:
        name: what it does.
        bytes_per_element: read and written for each element of the shard, every tensor once.
        make: given the shard's layout and the device, the call.
    """

    name: str
    bytes_per_element: float
    make: Callable[[ShardLayout, torch.device], Callable[[], Any]]


def _merge(parts: int) -> Callable[[ShardLayout, torch.device], Callable[[], Any]]:
    def make(layout: ShardLayout, device: torch.device) -> Callable[[], Any]:
        received = torch.zeros(RANKS, layout.numel, dtype=torch.bfloat16, device=device)
        total, m2 = (torch.zeros(layout.numel, device=device) for _ in range(2))
        return lambda: merge_chunks_(received, total, m2, parts)

    return make


KERNELS = (
    Kernel("moments of 2 bf16 chunks, first micro-batch", RANKS * 2 + 8, _merge(0)),
    Kernel("moments of 2 bf16 chunks, merged", RANKS * 2 + 16, _merge(1)),
)


def run(rank: Rank, record: Record, model: str) -> None:
    """Time all of them on the first rank, at one of two shards of a model."""
    if rank.is_first:
        bandwidth = copy_bandwidth(rank.device)
        rank.log(f"copy: {bandwidth / 1e9:.0f} GB/s")
        layout = shard_layout(layers_of(NETWORKS[model]), 0, RANKS)
        for kernel in KERNELS:
            free(rank.device)
            seconds = Spread.of(repeat(kernel.make(layout, rank.device), Clock(rank.device), REPETITIONS, WARMUP))
            floor = kernel.bytes_per_element * layout.numel / bandwidth
            record.add(
                "kernels",
                {
                    "name": kernel.name,
                    "elements": layout.numel,
                    "bytes_per_element": kernel.bytes_per_element,
                    "copy_bytes_per_second": bandwidth,
                    "floor_seconds": floor,
                    "seconds": seconds.to_json(),
                },
            )
            rank.log(
                f"{kernel.name}: {seconds.median * 1e3:.3f} ms ({seconds.p10 * 1e3:.3f} to {seconds.p90 * 1e3:.3f}), "
                f"{seconds.median / floor:.2f} x the floor"
            )
    free(rank.device)
    torch.distributed.barrier()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy from one large tensor to another."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = Spread.of(repeat(lambda: target.copy_(source), Clock(device), REPETITIONS, WARMUP)).median
    return 2 * source.numel() / seconds
