"""Start one process a rank: a GPU each and NCCL, or gloo processes on the CPU where there is no GPU."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch

# Ranks part only when one of them fails alone; then the others wait for it, and nobody should wait for them for long.
TIMEOUT = timedelta(minutes=4)


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    index: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.index == 0

    def log(self, text: str) -> None:
        """Print on the first rank."""
        if self.is_first:
            print(text, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank."""
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def slowest(self, seconds: list[float]) -> list[float]:
        """Element by element the largest over the ranks."""
        return [max(column) for column in zip(*self.gather(seconds), strict=True)]


def device_type() -> str:
    """``cuda`` where a GPU is found, otherwise ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_on_ranks(count: int, function: Callable[..., None], *arguments: Any) -> int:
    """``function(rank, *arguments)`` on ``count`` processes.

    Returns:
        0, or the exit status of the first rank that failed.

    Raises:
        ValueError: more ranks than GPUs.
    """
    kind = device_type()
    if kind == "cuda" and count > torch.cuda.device_count():
        raise ValueError(f"--ranks {count}, but there are {torch.cuda.device_count()} GPUs: each rank needs its own")
    os.environ["DS_ACCELERATOR"] = kind  # before a rank imports anything
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with this process
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(index, count, kind, folder, function, arguments), daemon=True)
            for index in range(count)
        ]
        for process in processes:
            process.start()
        waiting = list(processes)
        while waiting:
            connection.wait([process.sentinel for process in waiting])
            waiting = [process for process in waiting if process.is_alive()]
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                for process in waiting:
                    process.kill()
                return int(failed[0])
    return 0


def _worker(
    index: int, count: int, kind: str, folder: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        LOCAL_SIZE=str(count),
    )
    if kind == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    try:
        import deepspeed

        from ds_vrgd.zero import leave_out_shared_memory_op

        leave_out_shared_memory_op()
        deepspeed.utils.logger.setLevel("WARNING")
        device = torch.device(f"cuda:{index}" if kind == "cuda" else "cpu")
        if kind == "cuda":
            torch.cuda.set_device(device)
        deepspeed.init_distributed(
            {"cuda": "nccl", "cpu": "gloo"}[kind],
            init_method=f"file://{folder}/store",
            rank=index,
            world_size=count,
            timeout=TIMEOUT,
            auto_mpi_discovery=False,
            verbose=False,
        )
        function(Rank(index, count, device), *arguments)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # destroy_process_group would wait for ranks that are elsewhere
