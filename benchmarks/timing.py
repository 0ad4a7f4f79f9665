"""Time on the device's own clock, and the median and spread of repeated times."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spread:
    """The median and the 10th and 90th percentile of ``count`` values, in their unit."""

    median: float
    p10: float
    p90: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value, percentiles interpolated linearly.

        Raises:
            ValueError: there is no value.
        """
        if not values:
            raise ValueError("no value to take the median of")
        low, median, high = torch.tensor(values, dtype=torch.float64).quantile(
            torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        )
        return cls(float(median), float(low), float(high), len(values))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


class Clock:
    """Marks in the order of the device's work: CUDA events, or the host's clock where there is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ballast: Tensor | None = None

    def mark(self) -> Any:
        """A moment: when the device gets here; the host does not wait for it."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def occupy(self) -> None:
        """Give the device about 20 ms of work; nothing where there is no GPU."""
        if self._device.type == "cuda":
            if self._ballast is None:
                self._ballast = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=self._device)
            for _ in range(12):
                torch.mm(self._ballast, self._ballast)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has passed."""
        if self._device.type != "cuda":
            return float(end - begin)
        return float(begin.elapsed_time(end)) * 1e-3


def repeat(function: Callable[[], Any], clock: Clock, repetitions: int, warmup: int) -> list[float]:
    """Return seconds of each of ``repetitions`` calls made back to back, after ``warmup`` more that are not timed."""
    for _ in range(warmup):
        function()
    clock.synchronize()
    marks = [clock.mark()]
    for _ in range(repetitions):
        function()
        marks.append(clock.mark())
    clock.synchronize()
    return [clock.seconds(begin, end) for begin, end in itertools.pairwise(marks)]


def repeat_with_host_ahead(
    function: Callable[[], Any], clock: Clock, repetitions: int, warmup: int, align: Callable[[], Any]
) -> list[float]:
    """Do as :func:`repeat`, but the host issues each call while the device is still busy with something else.

    ``align`` is a small collective: the ranks' devices begin together when it is over.
    """
    for _ in range(warmup):
        function()
    marks = []
    for _ in range(repetitions):
        clock.synchronize()
        clock.occupy()
        align()
        begin = clock.mark()
        function()
        marks.append((begin, clock.mark()))
    clock.synchronize()
    return [clock.seconds(begin, end) for begin, end in marks]
