"""One process per rank: a GPU each and NCCL, or gloo processes on the CPU where there is no GPU."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# For all that one call measures.
TIMEOUT_S = 86_400


@dataclass(frozen=True)
class Rank:
    """This process among the others."""

    index: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Return whether this is the rank that writes and prints."""
        return self.index == 0

    def log(self, text: str) -> None:
        """Print on the first rank."""
        if self.is_first:
            print(text, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, on every rank."""
        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value)
        return values

    def slowest(self, seconds: list[float]) -> list[float]:
        """Return, element by element, the largest over the ranks."""
        return [max(column) for column in zip(*self.gather(seconds), strict=True)]


def device_type() -> str:
    """Return ``cuda`` where a GPU is found, otherwise ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_on_ranks(count: int, function: Callable[..., None], *arguments: Any) -> int:
    """Run ``function(rank, *arguments)`` on ``count`` processes.

    Returns:
        0, or 1 if a rank failed.

    Raises:
        ValueError: more ranks than GPUs.
    """
    kind = device_type()
    os.environ["DS_ACCELERATOR"] = kind  # before anything is imported
    from ds_vrgd.doctor import ranks

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with this process
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S, "deterministic": False, "quiet": False}
    try:
        ranks.run_on_ranks(count, _call, kind, function, arguments, **options)
    except ranks.RankFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


def _call(kind: str, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    index = torch.distributed.get_rank()
    device = torch.device(f"cuda:{index}" if kind == "cuda" else "cpu")
    function(Rank(index, torch.distributed.get_world_size(), device), *arguments)
