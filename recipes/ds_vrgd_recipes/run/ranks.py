"""Communication of the ranks outside of training."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ds_vrgd_recipes.run.errors import InputError, PreparationFailed, TrainingFailed

_PREPARATION_TIMEOUT = timedelta(days=2)  # a large corpus takes hours to tokenise

_RELEASE_SECONDS = 0.1
_REPORT_TIMEOUT = timedelta(seconds=10)  # ranks that fail for the same reason fail within that of each other

T = TypeVar("T")


def leave() -> None:
    """Leave the process group, so that this process exits with its own status; does nothing without a group.

    A thread of gloo frees the objects of the last collective, and needs the interpreter for that: if the main thread
    has ended it by then, the thread aborts the process. Destroying the groups waits for their threads only if nobody
    else has kept a group, and DeepSpeed keeps its own. So the main thread waits for a moment.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(_RELEASE_SECONDS)


def own_name(rank: int | None = None) -> str:
    """Return how messages of this process begin: with nothing on rank 0."""
    number = int(os.environ.get("RANK", "0")) if rank is None else rank
    return f"rank {number} on {socket.gethostname()}: " if number else ""


def share(count: int, micro_batch: int, rank: int, ranks: int) -> Iterator[tuple[list[int], int]]:
    """Yield the rows of each held-out batch of a rank, ``micro_batch`` of them, and how many are real.

    Every rank gets as many full batches, which sharded models need: row 0 fills up the last ones.
    """
    for start in range(0, count, micro_batch * ranks):
        first = start + rank * micro_batch
        real = list(range(first, min(first + micro_batch, count)))
        yield real + [0] * (micro_batch - len(real)), len(real)


class Ranks:
    """The ranks outside of training: one works while the others wait, or all compare values.

    Attributes:
        rank: of this process.
        size: number of ranks.
    """

    _made = 0

    def __init__(self) -> None:
        # A group of its own: waiting for hours must not need an hours-long timeout in training's collectives.
        self._group = torch.distributed.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)
        Ranks._made += 1
        self._reports = f"errors {Ranks._made}"
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 alone, and return its result on every rank. Collective.

        Raises:
            InputError, PreparationFailed, TrainingFailed: raised by ``work``, on every rank. Any other exception is
                raised as it is on rank 0, and as TrainingFailed on the others, which must not be left waiting.
        """
        outcome: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                outcome[0] = work()
                pickle.dumps(outcome[0])  # a result that cannot be sent must not leave the others waiting either
            except (InputError, PreparationFailed, TrainingFailed) as error:
                outcome = [None, error]
            except BaseException as error:
                failure, outcome = error, [None, TrainingFailed(f"rank 0 failed: {type(error).__name__}: {error}")]
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def messages(self, error: str) -> list[str]:
        """Return what this rank must print when it ends with ``error``. Call it once.

        Where all ranks end with an error, rank 0 prints each message once. A rank that ends alone prints its own.
        """
        # Through the store: the others may be in a collective of the group, which must not be mixed with this.
        c10d = torch.distributed.distributed_c10d
        store = c10d.PrefixStore(self._reports, c10d._get_default_store())
        try:
            store.set(f"{self.rank}", json.dumps([error, f"{own_name(self.rank)}{error}"]))
            store.wait([f"{rank}" for rank in range(self.size)], _REPORT_TIMEOUT)
            errors = [json.loads(store.get(f"{rank}")) for rank in range(self.size)]
            store.set(f"seen {self.rank}", "")
        except RuntimeError:
            return [f"{own_name(self.rank)}{error}"]
        if self.rank:
            return []
        with contextlib.suppress(RuntimeError):  # this process may be the one that keeps the store
            store.wait([f"seen {rank}" for rank in range(self.size)], _REPORT_TIMEOUT)
        first: dict[str, str] = {}
        for text, named in errors:
            first.setdefault(text, named)
        return list(first.values())

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value`` by rank, on every rank. Collective."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
