"""A run in which one rank meets a fault at a known point: patches of the loop, and the script with them.

    FAULT="RANK NAME N" python tests/recipes/bert/faults.py <arguments of scripts/pretrain_bert.py>

``kill`` is SIGKILL: nothing can be cleaned up, as in a crash of the machine.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from ds_vrgd_recipes.bert.main import main
from ds_vrgd_recipes.bert.store import ShardBuilder
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.loop import Training


def _before(owner: Any, name: str, number: int, strike: Callable[..., None]) -> AbstractContextManager[Any]:
    """Call ``strike`` before the ``number``-th call of a method, with its arguments."""
    original, calls = getattr(owner, name), []

    def method(*arguments: Any, **keywords: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            strike(*arguments, **keywords)
        return original(*arguments, **keywords)

    return patch.object(owner, name, method)


def _kill(*arguments: Any, **keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_preparation(document: int) -> AbstractContextManager[Any]:
    """While the corpus is being tokenised."""
    return _before(ShardBuilder, "add", document, _kill)


def kill_in_update(number: int) -> AbstractContextManager[Any]:
    """At the second backward pass of the run's ``number``-th update; the others wait for this rank's gradients."""

    def strike(training: Training, *arguments: Any) -> None:
        _before(training.engine, "backward", 2, _kill).__enter__()

    return _before(Training, "update", number, strike)


def kill_in_checkpoint(number: int) -> AbstractContextManager[Any]:
    """Half-way through this rank's ``number``-th file."""

    def strike(engine: Any, state: Any, path: str) -> None:
        whole(engine, state, path)
        os.truncate(path, os.path.getsize(path) // 2)
        _kill()

    whole = TorchCheckpointEngine.save
    return _before(TorchCheckpointEngine, "save", number, strike)


def sigterm_in_update(number: int) -> AbstractContextManager[Any]:
    """SIGTERM to this rank alone, in the run's ``number``-th update."""
    return _before(Training, "update", number, lambda *arguments: os.kill(os.getpid(), signal.SIGTERM))


def sigterm_to_all_in_update(number: int) -> AbstractContextManager[Any]:
    """To the whole process group: the ``deepspeed`` command, its launcher, ranks, and the processes that load data."""
    # By another process: what a rank sends to its own loaders ends them.
    command = ["kill", "-TERM", "--", f"-{os.getpgrp()}"]
    strike = partial(subprocess.run, command, check=True, start_new_session=True)
    return _before(Training, "update", number, lambda *arguments: strike())


def sigterm_to_launcher_in_update(number: int) -> AbstractContextManager[Any]:
    """To the process that has started the ranks."""
    return _before(Training, "update", number, lambda *arguments: os.kill(os.getppid(), signal.SIGTERM))


def sigterm_to_command_in_update(number: int) -> AbstractContextManager[Any]:
    """To the command alone that has started the launcher; what it does about it has the time of this update."""
    command = psutil.Process().parent().parent().pid

    def strike(*arguments: Any) -> None:
        os.kill(command, signal.SIGTERM)
        time.sleep(2.0)

    return _before(Training, "update", number, strike)


def sigterm_to_session_in_update(number: int) -> AbstractContextManager[Any]:
    """To the process alone that leads the session; what it does about it has the time of this update."""

    def strike(*arguments: Any) -> None:
        os.kill(os.getsid(0), signal.SIGTERM)
        time.sleep(2.0)

    return _before(Training, "update", number, strike)


def full_disk_in_checkpoint(step: int) -> AbstractContextManager[Any]:
    """The kernel lets no file of the checkpoint after update ``step`` grow beyond 4 kB (errno EFBIG, not ENOSPC)."""
    original = checkpoint.save_checkpoint

    def starved(engine: Any, folder: Path, tag: str, state: Any) -> Any:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if tag == f"step-{step:06d}.partial" else soft, hard))
        try:
            return original(engine, folder, tag, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return patch.object(checkpoint, "save_checkpoint", starved)


if __name__ == "__main__":
    rank, fault, at = os.environ["FAULT"].split()
    own = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
    with globals()[fault](int(at)) if own == rank else contextlib.nullcontext():
        sys.exit(main())
