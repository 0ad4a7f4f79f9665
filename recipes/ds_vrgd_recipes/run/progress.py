"""The progress of a training: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows the updates of a run, and estimates how long the rest of the run takes.

    The estimate takes the time so far, evaluations and checkpoints included, as proportional to the work.

    Args:
        phases: updates of each phase.
        work: the work of one update of each phase, in a unit of your choice, such as tokens.
        silent: whether to show nothing.
    """

    def __init__(self, phases: Sequence[int], work: Sequence[float], *, silent: bool = False) -> None:
        self._phases, self._work, self._silent = phases, work, silent
        self._done = 0.0
        self._began: float | None = None
        self._last_line = float("-inf")
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    @contextmanager
    def phase(self, phase: int, title: str | None, first_step: int) -> Iterator[None]:
        """Show the updates of a phase, from ``first_step`` on."""
        self._began = time.monotonic() if self._began is None else self._began
        self._phase, self._title, self._step = phase, title or "training", first_step
        disable = True if self._silent else None  # None: unless stderr is a terminal
        with tqdm(
            desc=title, total=self._phases[phase], initial=first_step, disable=disable, dynamic_ncols=True
        ) as self._bar:
            yield

    def made(self, shown: Mapping[str, str], counts: Mapping[str, float], seconds: float) -> None:
        """Count an update of the phase.

        Args:
            shown: its numbers, by what they are called.
            counts: what it has trained on, such as tokens, to be shown per second: of a line, since the line before.
            seconds: the time that it took.
        """
        self._done += self._work[self._phase]
        self._step += 1
        self._counts.update(counts)
        self._seconds += seconds
        left = str(timedelta(seconds=round(self.seconds_left())))
        shown = {**shown, **{f"{name}/s": f"{count / self._seconds:,.0f}" for name, count in self._counts.items()}}
        self._bar.set_postfix({**shown, "left": left}, refresh=False)
        self._bar.update()
        now, is_last = time.monotonic(), self._step == self._phases[self._phase]
        if self._bar.disable and not is_last and now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line, self._seconds = now, 0.0
        self._counts.clear()
        if self._bar.disable and not self._silent:
            update = sum(self._phases[: self._phase]) + self._step
            numbers = ", ".join(f"{name} {value}" for name, value in shown.items())
            print(
                f"{self._title}: update {update:,} of {sum(self._phases):,}, {numbers}, {left} left",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def seconds_left(self) -> float:
        """Return the estimated seconds until the last update of the last phase."""
        assert self._began is not None
        of_phase = (self._phases[self._phase] - self._step) * self._work[self._phase]
        later = zip(self._phases[self._phase + 1 :], self._work[self._phase + 1 :], strict=True)
        rest = of_phase + sum(updates * work for updates, work in later)
        return rest * (time.monotonic() - self._began) / self._done


def peak_memory_gb(device: torch.device) -> float:
    """Return the most memory that this process has held so far in GB (1e9 bytes): of tensors on a GPU, else in RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
