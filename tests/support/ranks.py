"""Run a function on several ranks, many cases in one call: a rank takes seconds to import DeepSpeed.

The ranks are gloo processes on the CPU; with ``DS_VRGD_TEST_DEVICE=cuda`` they have a GPU each and communicate through
NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from ds_vrgd.doctor import ranks

TIMEOUT_S = 1200
DEVICE = os.environ.get("DS_VRGD_TEST_DEVICE", "cpu")
#: Ranks have a GPU each; on a CPU any number shares the cores.
MOST_RANKS = 64 if DEVICE == "cpu" else torch.cuda.device_count()
ENVIRONMENT = {
    "DS_ACCELERATOR": DEVICE,
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@cache
def _context() -> Any:
    """Return a context that forks ranks from a server with their imports. CUDA may not be forked: it spawns."""
    if DEVICE != "cpu":
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def run_on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments)`` on every rank, and return what each returned.

    Skips the test where there are fewer GPUs than ranks. A rank that fails ends the others.

    Raises:
        RankFailed: with every failing rank's traceback.
    """
    if world > MOST_RANKS:
        pytest.skip(f"needs {world} GPUs")
    return ranks.run_on_ranks(
        world,
        _call,
        function,
        arguments,
        timeout_s=TIMEOUT_S,
        quiet=False,
        context=_context(),
        environment=ENVIRONMENT,
    )


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from deepspeed.runtime import bf16_optimizer

    bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None  # DeepSpeed has it print, always
    if DEVICE != "cpu":
        torch.use_deterministic_algorithms(True)
    return function(torch.distributed.get_rank(), *arguments)
