"""Start the ranks, and end them all when one ends badly or hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, start_processes

from ds_vrgd.zero import compute_fp16_on_cpu, leave_out_shared_memory_op

#: Longest that a check may take.
TIMEOUT_S = 900
# For a rank to tell where it hangs, before it is killed.
GRACE_S = 20

T = TypeVar("T")


class RankFailed(Exception):
    """A rank ended badly, or did not end. The message names it and holds its traceback, or where it hung."""

    @property
    def summary(self) -> str:
        """What happened, and the last line of what the rank told."""
        lines = str(self).strip().splitlines()
        return " ".join([lines[0], *lines[1:][-1:]])


def default_world() -> int:
    """Ranks to start where nobody says how many: one a GPU, two without any."""
    accelerator = get_accelerator()
    return 2 if accelerator.device_name() == "cpu" else int(accelerator.device_count())


def run_on_ranks(world: int, function: Callable[..., T], *arguments: Any, timeout_s: float = TIMEOUT_S) -> T:
    """Start ``world`` ranks and return what ``function(*arguments)`` returns on rank 0.

    What the ranks write to their standard output goes to standard error, so that the output is the caller's.

    Raises:
        RankFailed: a rank raised an error, was killed, or was not done in ``timeout_s`` seconds.
        ValueError: there are fewer accelerators than ranks.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and world > accelerator.device_count():
        raise ValueError(
            f"--world {world}, but there are {accelerator.device_count()} accelerators, and each rank needs its own. "
            "Give a smaller number, or set DS_ACCELERATOR=cpu in the environment to check on the CPU"
        )
    with tempfile.TemporaryDirectory() as name:
        folder, end = Path(name), time.monotonic() + timeout_s + GRACE_S
        context: Any = start_processes(
            _rank, (world, folder, timeout_s, function, arguments), world, join=False, start_method="spawn"
        )
        try:
            while not context.join(timeout=max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    late = [index for index, process in enumerate(context.processes) if process.is_alive()]
                    raise RankFailed(f"after {timeout_s:.0f} s rank {', '.join(map(str, late))} was not done")
        except ProcessException as error:
            raise RankFailed(_first_failure(folder, error, timeout_s)) from None
        finally:
            for process in context.processes:
                process.kill()
        result: T = pickle.loads((folder / "result").read_bytes())
        return result


def _first_failure(folder: Path, error: ProcessException, timeout_s: float) -> str:
    """What began it: other ranks fail in turn when one has gone."""
    told = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("error*"))
    killed = isinstance(error, ProcessExitedException) and error.signal_name
    if told and not killed:
        return f"rank {told[0][1]} failed:\n{told[0][2]}"
    hung = {path.name: text for path in sorted(folder.glob("hung*")) if (text := path.read_text(encoding="utf-8"))}
    if hung and not killed:
        places = "\n".join(f"{name.replace('hung', 'rank ')}:\n{text}" for name, text in hung.items())
        return f"the ranks were not done after {timeout_s:.0f} s; where they were:\n{places}"
    return f"rank {error.error_index} {str(error).partition(f'process {error.error_index} ')[2]}"


def _rank(
    rank: int, world: int, folder: Path, timeout_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
    )
    try:
        hung = (folder / f"hung{rank}").open("w", encoding="utf-8")
        _join(timeout_s, hung, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = function(*arguments)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"error{rank}").write_bytes(pickle.dumps((time.monotonic(), rank, traceback.format_exc())))
        os._exit(1)  # destroying the process group would wait for ranks that are elsewhere
    torch.distributed.barrier()
    _leave()


def run_as_rank(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in this process, which a launcher has started as one of the ranks.

    An error ends the process at once, so that the launcher ends the others.
    """
    try:
        _join(TIMEOUT_S)
        result = function(*arguments)
        _leave()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    return result


def _join(timeout_s: float, hung: TextIO | None = None, **rendezvous: Any) -> None:
    """Make this process one of the ranks.

    After ``timeout_s`` seconds it ends, and writes where it was.

    Args:
        timeout_s: for all that follows.
        hung: an open file for where it was; None for standard error.
        rendezvous: for ``deepspeed.init_distributed``; nothing where a launcher has set the environment.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=hung or sys.stderr)
    deepspeed.utils.logger.setLevel("ERROR")
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        torch.set_num_threads(1)
        leave_out_shared_memory_op()
        compute_fp16_on_cpu()
        backend = "gloo"
    else:
        # The plain copy of the model must compute what the engine's does, bit for bit.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = accelerator.communication_backend_name()
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, **rendezvous)


def _leave() -> None:
    """Stop being a rank: an exit with live process groups can lose the exit status."""
    faulthandler.cancel_dump_traceback_later()
    torch.distributed.destroy_process_group()
