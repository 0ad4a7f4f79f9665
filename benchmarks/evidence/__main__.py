"""``python -m benchmarks.evidence [NAME ...] --size small`` measures, ``... report [NAME ...]`` writes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.evidence import NAMES
from benchmarks.evidence.experiment import SIZES, SMALL, Rows, sweep
from benchmarks.evidence.report import report
from benchmarks.ranks import device_type
from benchmarks.record import environment

DESCRIPTION = """Test the paper's claims. Every setting is a row in OUTPUT/NAME.json as soon as it was measured; one
that has a row is not run again, so the same command goes on with a sweep that was stopped. "report" writes tables and
figures of what is there into docs/RESULTS.md."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Arguments of the command; ``names`` without "report", all of them where none is given."""
    parser = argparse.ArgumentParser("python -m benchmarks.evidence", description=DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"report, or of {', '.join(NAMES)}; without: all")
    parser.add_argument("--size", choices=SIZES, default=SMALL, help="small: minutes on two cores; full: on a GPU")
    parser.add_argument("--output", type=Path, default=Path("out/evidence"), help="folder (out/evidence)")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no setting that would end later")
    parser.add_argument(
        "--workers", type=int, default=1, help="settings at a time, a process each (1: no other process)"
    )
    parsed = parser.parse_args(arguments)
    parsed.report = parsed.names[:1] == ["report"]
    parsed.names = (parsed.names[1:] if parsed.report else parsed.names) or list(NAMES)
    if unknown := [name for name in parsed.names if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: no such experiment; there are {', '.join(NAMES)}")
    return parsed


def main(arguments: list[str]) -> int:
    """Measure, or write the page. 1 where settings have no row still."""
    chosen = parse(arguments)
    if chosen.report:
        for name in chosen.names:
            print(report(name, chosen.output) or f"{name}: no row in {chosen.output}")
        return 0
    deadline = None if chosen.budget is None else time.monotonic() + chosen.budget
    command = f"python -m benchmarks.evidence --size {chosen.size}"
    used = environment(command, 1, torch.device(device_type()))
    left = {
        name: sweep(
            name, chosen.size, Rows(chosen.output / f"{name}.json"), used, deadline=deadline, workers=chosen.workers
        )
        for name in chosen.names
    }
    for name, settings in left.items():
        if settings:
            print(f"{name}: {len(settings)} settings have no row; the same command goes on with them", file=sys.stderr)
    return 1 if any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
