"""A profile of torch.profiler, split into the parts of a training step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._C._autograd import DeviceType

#: Names of the runtime's and driver's calls, of which CUDA has several spellings.
LAUNCHES = ("LaunchKernel", "GraphLaunch")
COPIES = ("MemcpyAsync", "Memcpy2DAsync", "MemsetAsync")
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "aten::item",
    "aten::_local_scalar_dense",
)


@dataclass
class Phase:
    """One part of the profiled steps; times in microseconds.

    Attributes:
        host: between the part's beginning and end on the host.
        host_by_name: time in each operator or call itself, on all of the host's threads.
        device_by_name: time of each kernel that the part has launched, whenever it ran.
        calls, launches: how often each of them was called, or each kernel launched.
    """

    host: float = 0.0
    host_by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    device_by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)


def phases(events: Iterable[Any], parts: Sequence[str]) -> dict[str, Phase]:
    """Sort a profile's events by the part during which the host issued them.

    Args:
        events: ``torch.profiler.profile.events()``.
        parts: names under which the parts were recorded, one after the other.
    """
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    found = {part: Phase() for part in parts}
    # Also what autograd's own thread does belongs to the part during which it did it.
    windows = sorted(
        (event.time_range.start, event.time_range.end, event.name) for event in on_host if event.name in found
    )
    for begin, end, part in windows:
        found[part].host += end - begin
    current = 0
    for event in sorted(on_host, key=lambda event: event.time_range.start):
        start = event.time_range.start
        while current < len(windows) and start >= windows[current][1]:
            current += 1
        if current == len(windows):
            break
        begin, _, part = windows[current]
        if start < begin:
            continue
        phase = found[part]
        name = f"({part}: outside of all operators)" if event.name == part else event.name
        phase.host_by_name[name] += float(event.self_cpu_time_total)
        phase.calls[name] += 1
        for kernel in event.kernels:
            phase.device_by_name[kernel.name] += float(kernel.duration)
            phase.launches[kernel.name] += 1
    return found


def report(found: dict[str, Phase], top: int) -> list[str]:
    """Return lines of the counts of all parts, then the longest entries of each part."""
    lines = [f"{'':34}" + "".join(f"{part:>12}" for part in found)]
    counts = {
        "host, ms": [f"{phase.host / 1e3:.2f}" for phase in found.values()],
        "device, ms of kernels": [f"{sum(phase.device_by_name.values()) / 1e3:.2f}" for phase in found.values()],
        "kernel launches": [str(_count(phase, LAUNCHES)) for phase in found.values()],
        "copies and fills": [str(_count(phase, COPIES)) for phase in found.values()],
    }
    counts |= {name: [str(phase.calls[name]) for phase in found.values()] for name in WAITS}
    lines += [f"{name:34}" + "".join(f"{cell:>12}" for cell in cells) for name, cells in counts.items()]
    for part, phase in found.items():
        lines += _longest(f"{part}: host time in the operator itself", phase.host_by_name, phase.calls, top)
        lines += _longest(f"{part}: device time of what it launched", phase.device_by_name, phase.launches, top)
    return lines


def _count(phase: Phase, names: Sequence[str]) -> int:
    return sum(count for called, count in phase.calls.items() if any(name in called for name in names))


def _longest(title: str, times: dict[str, float], counts: Counter[str], top: int) -> list[str]:
    longest = sorted(times.items(), key=lambda item: item[1], reverse=True)[:top]
    rows = [f"{time / 1e3:10.3f} ms {counts[name]:8d} x  {name[:90]}" for name, time in longest]
    return ["", title, *(rows or ["    nothing"])]
