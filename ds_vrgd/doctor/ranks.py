"""Start ranks on this machine, for the doctor, benchmarks and tests; end them all when one fails or hangs."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from ds_vrgd.engines.deepspeed import compute_fp16_on_cpu, leave_out_shared_memory_op

#: Longest that a check may take.
TIMEOUT_S = 900
# For a rank's imports, which its own time does not include; and after a failure, for the other ranks to report theirs.
START_S, GRACE_S = 60, 5

T = TypeVar("T")


class RankFailed(Exception):
    """A rank failed, was killed, or hung. The message names it and holds its traceback, or where it hung.

    The arguments are a text for each rank that reported one, the first failure first.
    """

    def __str__(self) -> str:
        return "\n".join(self.args)

    @property
    def summary(self) -> str:
        """Return what happened: the first line, and the error itself where there is a traceback."""
        lines = str(self.args[0]).strip().splitlines()
        return " ".join([lines[0], *(lines[-1:] if lines[0].endswith(":") else [])])


def default_world() -> int:
    """Return the number of ranks to start if none is given: one per GPU, two without any."""
    accelerator = get_accelerator()
    return 2 if accelerator.device_name() == "cpu" else int(accelerator.device_count())


def run_on_ranks(
    world: int,
    function: Callable[..., T],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
    deterministic: bool = True,
    quiet: bool = True,
    context: Any = None,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Start ``world`` ranks and return what ``function(*arguments)`` returns on each.

    The ranks are processes with a gloo group on the CPU, or with a GPU each and NCCL. Starting them takes seconds:
    run many cases in one call. They end with this process, however it ends.

    Args:
        world: number of ranks.
        function, arguments: what to run; both can be pickled, and so can the result.
        timeout_s: for all of it, in seconds.
        deterministic: have a GPU compute the same bits every time.
        quiet: send the ranks' standard output to standard error, so that the caller's output is its own.
        context: of multiprocessing; None for "spawn".
        environment: further variables of the ranks' environment.

    Raises:
        RankFailed: a rank raised an error, was killed, or was not done in ``timeout_s`` seconds.
        ValueError: there are fewer accelerators than ranks.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and world > accelerator.device_count():
        raise ValueError(
            f"{world} ranks, but there are {accelerator.device_count()} accelerators, and each rank needs its own. Ask "
            "for fewer, or set DS_ACCELERATOR=cpu in the environment to start them on the CPU"
        )
    context = context or torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(world))
        options = (folder, world, os.environ | (environment or {}) | sizes, timeout_s, deterministic, quiet)
        processes = [context.Process(target=_rank, args=(r, options, function, arguments)) for r in range(world)]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + START_S + timeout_s
            while (running := [process for process in processes if process.is_alive()]) and time.monotonic() < end:
                connection.wait([process.sentinel for process in running], timeout=1.0)
                if any(process.exitcode for process in processes) or _hung(folder):
                    end = min(end, time.monotonic() + GRACE_S)
            codes = [process.exitcode for process in processes]
            if any(code != 0 for code in codes):
                raise RankFailed(*_failures(folder, codes, timeout_s))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]


def _hung(folder: Path) -> list[str]:
    """Return, for each rank that hung, a text with the place."""
    hung = {path.name: text for path in sorted(folder.glob("hung*")) if (text := path.read_text(encoding="utf-8"))}
    return [f"{name.replace('hung', 'rank ')} was here:\n{text}" for name, text in hung.items()]


def _failures(folder: Path, codes: list[int | None], timeout_s: float) -> list[str]:
    """Return the failures, the first one first: when one rank has gone, the others fail in turn."""
    ended = [(rank, code) for rank, code in enumerate(codes) if code]
    found = [f"rank {rank} was ended by {signal.Signals(-code).name}" for rank, code in ended if code < 0]
    raised = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("error*"))
    found += [f"rank {rank} failed:\n{text}" for _, rank, text in raised]
    places = _hung(folder)
    if places or not ended:
        found.insert(0, f"the ranks were not done after {timeout_s:.0f} s")
    found += places
    return found or [f"rank {rank} ended with exit status {code}" for rank, code in ended]


def _rank(rank: int, options: tuple[Any, ...], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    folder, world, variables, timeout_s, deterministic, quiet = options
    threading.Thread(target=_end_with, args=(parent_process(),), daemon=True).start()
    if quiet:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.clear()  # a process that was forked has its server's
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        hung = (folder / f"hung{rank}").open("w", encoding="utf-8")
        _join(timeout_s, hung, deterministic, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        (folder / f"result{rank}").write_bytes(pickle.dumps(function(*arguments)))
        # Nobody leaves while another may still be reading from it; a barrier would have to be left, too.
        (folder / f"done{rank}").touch()
        while len(list(folder.glob("done*"))) < world:
            time.sleep(0.02)
    except BaseException:
        error = pickle.dumps((time.monotonic(), rank, traceback.format_exc()))
        (folder / f"error{rank}.tmp").write_bytes(error)
        (folder / f"error{rank}.tmp").rename(folder / f"error{rank}")
        _end(1)
    _end(0)


def _end_with(parent: Any) -> None:
    connection.wait([parent.sentinel])
    os._exit(1)


def _end(status: int) -> NoReturn:
    """End this process at once: destroying the process group would wait for ranks that are elsewhere, or are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_as_rank(function: Callable[..., T], *arguments: Any, join: Callable[[float], None] | None = None) -> T:
    """Return ``function(*arguments)``, run in this process, which a launcher has started as one of the ranks.

    An error ends the process at once, so that the launcher ends the others. ``join`` makes the process one of the
    ranks, given the seconds for all; None for the collectives of a training.
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


def _join(timeout_s: float, hung: TextIO | None = None, deterministic: bool = True, **rendezvous: Any) -> None:
    """Make this process one of the ranks.

    After ``timeout_s`` seconds it writes where it is to the open file ``hung``, which whoever started the ranks
    watches; without one it writes to standard error, and ends. Without ``rendezvous`` a launcher set the environment.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=hung is None, file=hung or sys.stderr)
    deepspeed.utils.logger.setLevel("ERROR")
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        leave_out_shared_memory_op()
        compute_fp16_on_cpu()
        backend = "gloo"
    else:
        if deterministic:  # the plain copy of the model must compute what the engine's does, bit for bit
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = accelerator.communication_backend_name()
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, **rendezvous)
