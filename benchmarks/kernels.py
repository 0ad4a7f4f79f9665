"""Each kernel against its floor: the bytes that it must move, at the bandwidth of a large copy on the same card."""

from __future__ import annotations

import traceback
from typing import Any

import torch

from benchmarks.bert import NETWORKS
from benchmarks.kernel_table import KERNELS, RANKS, Kernel
from benchmarks.ranks import Rank
from benchmarks.record import Record
from benchmarks.shards import layers_of, shard_layout
from benchmarks.timing import Clock, Spread, repeat
from benchmarks.training import free
from ds_vrgd.moments import ShardLayout

REPETITIONS = 25
WARMUP = 8
COPY_BYTES = {"cuda": 2**31, "cpu": 2**20}


def run(rank: Rank, record: Record, model: str) -> None:
    """Time all of them on the first rank, at one of two shards of a model, while the others rest."""
    if rank.is_first:
        bandwidth = copy_bandwidth(rank.device)
        rank.log(f"copy: {bandwidth / 1e9:.0f} GB/s")
        layout = shard_layout(layers_of(NETWORKS[model]), 0, RANKS)
        for kernel in KERNELS:
            if rank.device.type == "cuda" or not kernel.needs_gpu:
                row = measure(kernel, layout, rank.device, bandwidth)
                free(rank.device)
                record.add("kernels", row)
                rank.log(f"{kernel.name}: {summary(row)}")
    torch.distributed.barrier()


def measure(kernel: Kernel, layout: ShardLayout, device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Time one of them; an error is a row too."""
    row: dict[str, Any] = {
        "name": kernel.name,
        "elements": layout.numel,
        "bytes_per_element": kernel.bytes_per_element,
        "copy_bytes_per_second": bandwidth,
        "floor_seconds": kernel.bytes_per_element * layout.numel / bandwidth,
        "seconds": None,
        "failure": None,
    }
    try:
        row["seconds"] = Spread.of(repeat(kernel.make(layout, device), Clock(device), REPETITIONS, WARMUP)).to_json()
    except Exception:
        row["failure"] = traceback.format_exc()
    return row


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    if row["failure"]:
        return f"failed: {row['failure'].strip().splitlines()[-1]}"
    seconds = row["seconds"]
    return (
        f"{seconds['median'] * 1e3:.3f} ms ({seconds['p10'] * 1e3:.3f} to {seconds['p90'] * 1e3:.3f}), "
        f"{seconds['median'] / row['floor_seconds']:.2f} x the floor"
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy from one large tensor to another."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = Spread.of(repeat(lambda: target.copy_(source), Clock(device), REPETITIONS, WARMUP)).median
    return 2 * source.numel() / seconds
