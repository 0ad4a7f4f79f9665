"""Run a function on several ranks, many cases in one spawn: a rank takes seconds to import DeepSpeed.

The ranks are gloo processes on the CPU; with ``DS_VRGD_TEST_DEVICE=cuda`` they have a GPU each and talk through NCCL.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch

TIMEOUT_S = 1200
DEVICE = os.environ.get("DS_VRGD_TEST_DEVICE", "cpu")
BACKEND = {"cpu": "gloo", "cuda": "nccl"}[DEVICE]


def _worker(
    rank: int,
    world: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # that of the server that it was forked from
    os.environ.update(
        environment,
        DS_ACCELERATOR=DEVICE,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        import deepspeed
        import deepspeed.runtime.bf16_optimizer

        from ds_vrgd.zero import compute_fp16_on_cpu, leave_out_shared_memory_op

        leave_out_shared_memory_op()
        compute_fp16_on_cpu()
        deepspeed.utils.logger.setLevel("ERROR")
        deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None  # it is told to print, always
        if DEVICE != "cpu":
            # The plain copy of the model must compute what the engine's does, bit for bit.
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            torch.use_deterministic_algorithms(True)
            torch.cuda.set_device(rank)
        deepspeed.init_distributed(
            BACKEND,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            auto_mpi_discovery=False,
            verbose=False,
        )
        outcome: Any = ("ok", function(rank, *arguments))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    Path(folder, f"rank{rank}.tmp").write_bytes(pickle.dumps(outcome))
    Path(folder, f"rank{rank}.tmp").rename(Path(folder, f"rank{rank}"))
    # A rank that failed alone would leave the others waiting in destroy_process_group.
    os._exit(0 if outcome[0] == "ok" else 1)


@cache
def _context() -> Any:
    """Ranks are forked from a server that has imported what they need; but for CUDA's, which may not be forked."""
    if DEVICE != "cpu":
        return torch.multiprocessing.get_context("spawn")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def run_on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``function(rank, *arguments)`` on every rank; returns what each returned.

    Skips the test where there are fewer GPUs than ranks. A rank that fails ends the others.

    Raises:
        AssertionError: with every failing rank's traceback.
    """
    if DEVICE != "cpu" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_worker, args=(rank, world, folder, dict(os.environ), function, arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        running, end = processes, time.monotonic() + TIMEOUT_S
        while running and time.monotonic() < end and not any(process.exitcode for process in processes):
            connection.wait([process.sentinel for process in running], end - time.monotonic())
            running = [process for process in running if process.is_alive()]
        for process in processes:
            process.join(5)
            process.kill()
        outcomes = [
            pickle.loads(path.read_bytes())
            if (path := Path(folder, f"rank{rank}")).exists()
            else ("error", "no answer")
            for rank in range(world)
        ]
    failures = [f"rank {rank}: {answer}" for rank, (verdict, answer) in enumerate(outcomes) if verdict != "ok"]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in outcomes]
