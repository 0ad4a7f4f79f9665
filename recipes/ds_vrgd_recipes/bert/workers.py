"""Processes that share the preparation: results in the order of the jobs, never more than a few in flight."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import TypeVar

from ds_vrgd_recipes.run.errors import PreparationFailed

Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers:
    """A pool of ``processes``; with 0 of them every job runs in this process.

    Memory is bounded: at most ``processes + 1`` jobs are under way or finished and not yet consumed.

    Attributes:
        processes: their number.

    Args:
        threads: whether the tokenizer library may use all cores in each process.
    """

    def __init__(self, processes: int, threads: bool = False) -> None:
        self.processes = processes
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            # Forked: a fresh process would spend seconds and 250 MB on importing torch, which no job uses.
            context = multiprocessing.get_context("fork")
            gc.collect()
            gc.freeze()  # else the first collection in each process would copy every page that it shares with this one
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(threads,))
            self._pool.submit(os.getpid).result()  # forks all of them now, before this process has threads

    def map(self, function: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield ``function`` of each job, in order. What it raises is raised here.

        Raises:
            PreparationFailed: a process was killed.
        """
        if self._pool is None:
            yield from map(function, jobs)
            return
        pending: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                pending.append(self._pool.submit(function, job))
                if len(pending) > self.processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise PreparationFailed(
                "a process of the preparation was killed, perhaps because memory ran out; start the same command "
                "again, with fewer processes if so: it resumes where it stopped"
            ) from error
        finally:
            for future in pending:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _begin(threads: bool) -> None:
    """Set up a new process: one thread for the tokenizer or many; it ends with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads else "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_the_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
