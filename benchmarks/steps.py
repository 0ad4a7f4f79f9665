"""Whole training steps: time of each part, and memory."""

from __future__ import annotations

import itertools
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from benchmarks.bert import NETWORKS
from benchmarks.plan import Configuration
from benchmarks.ranks import Rank
from benchmarks.record import Record
from benchmarks.timing import Clock, Spread
from benchmarks.training import Training, allocated, build, free, highest_allocated, release, storages

WARMUP_STEPS = 4
TIMED_STEPS = 12
PARTS = ("forward", "backward", "step")
_LONGEST_FAILURE = 2000


class StepTimer:
    """Runs steps one behind the other, and times them without ever waiting for the device in between.

    The parts are timed twice: on the device's clock, and on the host's, which shows how long the host needs to issue
    them. Where the two agree, the host is what the step waits for.
    """

    def __init__(self, training: Training, batches: list[dict[str, Tensor]], clock: Clock) -> None:
        self._training = training
        self._batches = batches
        self._clock = clock
        self.loss = math.nan

    def run(self, steps: int) -> dict[str, list[float]]:
        """Return seconds of each step: ``total`` and each part, on the device; the same with ``host `` in front."""
        self._clock.synchronize()
        marks = [self._mark()]
        for _ in range(steps):
            for batch in self._batches:
                loss = self._training.forward(batch)
                marks.append(self._mark())
                self._training.backward(loss)
                marks.append(self._mark())
                self._training.step()
                marks.append(self._mark())
        self._clock.synchronize()
        self.loss = float(loss.detach())
        return self._by_step(marks, "", 0, self._clock.seconds) | self._by_step(
            marks, "host ", 1, lambda begin, end: float(end - begin)
        )

    def _mark(self) -> tuple[Any, float]:
        return self._clock.mark(), time.perf_counter()

    def _by_step(
        self, marks: list[tuple[Any, float]], prefix: str, which: int, seconds: Callable[[Any, Any], float]
    ) -> dict[str, list[float]]:
        """A step of a micro-batches has 3a intervals; part p of it is the sum of every third."""
        intervals = [seconds(begin[which], end[which]) for begin, end in itertools.pairwise(marks)]
        size = len(PARTS) * len(self._batches)
        steps = [intervals[first : first + size] for first in range(0, len(intervals), size)]
        found = {prefix + part: [sum(step[i :: len(PARTS)]) for step in steps] for i, part in enumerate(PARTS)}
        return found | {prefix + "total": [sum(step) for step in steps]}


def measure(configuration: Configuration, rank: Rank) -> dict[str, Any]:
    """Build, warm up, time and take down one configuration; a collective of all ranks.

    Returns:
        The configuration's fields, and either ``seconds`` (a spread of each part; of the slowest rank), ``memory`` (one
        a rank, in bytes) and ``loss``, or ``failure``, the error's text. All fields exist; what is not known is None.
    """
    row: dict[str, Any] = asdict(configuration) | {
        "parameters": sum(param.numel() for _, param in NETWORKS[configuration.model].parameters()),
        "seconds": None,
        "memory": None,
        "loss": None,
        "failure": None,
    }
    free(rank.device)
    before, kept = allocated(rank.device), set(storages())
    training: Training | None = None
    timer: StepTimer | None = None
    try:
        training = build(configuration, rank)
        batches = NETWORKS[configuration.model].batches(
            configuration.accumulation, configuration.micro_batch, rank.index, rank.device
        )
        timer = StepTimer(training, batches, Clock(rank.device))
        timer.run(WARMUP_STEPS)
        highest_allocated(rank.device)
        seconds = timer.run(TIMED_STEPS)
        memory = {
            "before": before,
            "between_steps": allocated(rank.device),
            "peak": highest_allocated(rank.device),
        }
        row["seconds"] = {name: Spread.of(rank.slowest(values)).to_json() for name, values in seconds.items()}
        row["memory"] = rank.gather(memory)
        row["loss"] = timer.loss
    except Exception:
        # The text alone: the traceback's frames would keep the engine's memory.
        row["failure"] = traceback.format_exc()[-_LONGEST_FAILURE:]
    if training is not None:
        training.close()
    timer = training = None
    free(rank.device)
    release(kept)
    return row


def run(rank: Rank, record: Record, wanted: list[Configuration]) -> None:
    """Measure one configuration after the other; each is recorded and logged as it is done."""
    for number, configuration in enumerate(wanted, start=1):
        row = measure(configuration, rank)
        free(rank.device)
        record.add("steps", row)
        rank.log(f"[{number}/{len(wanted)}] {configuration}: {summary(row)}")


def summary(row: dict[str, Any]) -> str:
    """A row in a line."""
    if row["failure"] is not None:
        return f"failed: {row['failure'].strip().splitlines()[-1]}"
    seconds = row["seconds"]
    parts = ", ".join(f"{part} {seconds[part]['median'] * 1e3:.1f}" for part in PARTS)
    total = seconds["total"]
    return (
        f"{total['median'] * 1e3:.1f} ms ({total['p10'] * 1e3:.1f} to {total['p90'] * 1e3:.1f}; {parts}; "
        f"host's step {seconds['host step']['median'] * 1e3:.1f}), "
        f"peak {max(memory['peak'] for memory in row['memory']) / 1e9:.2f} GB, loss {row['loss']:.3f}"
    )
