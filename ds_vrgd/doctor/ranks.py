"""Start the ranks, and end them all when one ends badly or hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.multiprocessing.spawn import ProcessException, start_processes

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
        """What happened: the first line, and the error itself where there is a traceback."""
        lines = str(self).strip().splitlines()
        return " ".join([lines[0], *(lines[-1:] if lines[0].endswith(":") else [])])


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
            while not context.join(timeout=1.0):
                if time.monotonic() >= end or _places(folder):
                    patience = time.monotonic() + GRACE_S
                    while len(_places(folder)) < world and time.monotonic() < patience:
                        time.sleep(0.1)  # the others are about to tell, too
                    time.sleep(0.5)  # and to finish their tale
                    raise RankFailed(f"the ranks were not done after {timeout_s:.0f} s{''.join(_places(folder))}")
        except ProcessException as error:
            codes = [process.exitcode for process in context.processes]
            raise RankFailed(_first_failure(folder, error, codes)) from None
        finally:
            for process in context.processes:
                process.kill()
        result: T = pickle.loads((folder / "result").read_bytes())
        return result


def _places(folder: Path) -> list[str]:
    """Where the ranks were whose time was up, a text a rank."""
    hung = {path.name: text for path in sorted(folder.glob("hung*")) if (text := path.read_text(encoding="utf-8"))}
    return [f"\n{name.replace('hung', 'rank ')} was here:\n{text}" for name, text in hung.items()]


def _first_failure(folder: Path, error: ProcessException, codes: list[int | None]) -> str:
    """What began it: other ranks fail in turn when one has gone, and those that do not are sent SIGTERM."""
    for rank, code in enumerate(codes):
        if code is not None and code < 0 and code != -signal.SIGTERM:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
    told = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("error*"))
    if told:
        return f"rank {told[0][1]} failed:\n{told[0][2]}"
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
        # Nobody leaves while another may still be reading from it; a barrier would have to be left, too.
        (folder / f"done{rank}").touch()
        while len(list(folder.glob("done*"))) < world:
            time.sleep(0.02)
    except BaseException:
        (folder / f"error{rank}").write_bytes(pickle.dumps((time.monotonic(), rank, traceback.format_exc())))
        _end(1)
    _end(0)


def _end(status: int) -> NoReturn:
    """End this process at once: destroying the process group would wait for ranks that are elsewhere, or are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_as_rank(function: Callable[..., T], *arguments: Any, join: Callable[[float], None] | None = None) -> T:
    """``function(*arguments)`` in this process, which a launcher has started as one of the ranks.

    An error ends the process at once, so that the launcher ends the others.

    Args:
        function, arguments: what to run.
        join: makes the process one of the ranks, given the seconds for all; None for the collectives of a training.
    """
    try:
        (join or _join)(TIMEOUT_S)
        result = function(*arguments)
        with suppress(RuntimeError):  # another rank may have left first
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()  # an exit with live process groups can lose the exit status
        faulthandler.cancel_dump_traceback_later()
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        _end(1)
    except BaseException:
        traceback.print_exc()
        _end(1)
    return result


def _join(timeout_s: float, hung: TextIO | None = None, **rendezvous: Any) -> None:
    """Make this process one of the ranks.

    After ``timeout_s`` seconds it writes where it is, and ends if nobody else ends it.

    Args:
        timeout_s: for all that follows.
        hung: an open file for where it is, which whoever started the ranks watches; None for standard error.
        rendezvous: for ``deepspeed.init_distributed``; nothing where a launcher has set the environment.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=hung is None, file=hung or sys.stderr)
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
