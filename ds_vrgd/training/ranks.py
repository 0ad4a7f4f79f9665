"""What the ranks say to each other outside of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ds_vrgd.training.errors import InputError, PreparationFailed, TrainingFailed

_PREPARATION_TIMEOUT = timedelta(days=2)  # a large corpus takes hours to tokenise

_RELEASE_SECONDS = 0.1

T = TypeVar("T")


def leave() -> None:
    """Leave the ranks, so that this process's exit keeps its status. Nothing to do where it is none of them.

    A thread of gloo frees what the last collective was about, and needs the interpreter for that: if the main thread
    has ended it by then, the thread aborts the process. Destroying the groups waits for their threads only if nobody
    else has kept a group, and DeepSpeed keeps its own. So the main thread stands aside for a moment.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        time.sleep(_RELEASE_SECONDS)


class Ranks:
    """What the ranks say to each other outside of training: one works while the others wait, or all compare notes.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self) -> None:
        # A group of its own: waiting for hours must not need an hours-long timeout in training's collectives.
        self._group = torch.distributed.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Result of ``work`` on every rank. Collective.

        Raises:
            InputError, PreparationFailed, TrainingFailed: raised by ``work``, on every rank.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except (InputError, PreparationFailed, TrainingFailed) as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, on every rank, by rank. Collective."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
