"""``python -m evidence [NAME ...] --size small`` measures, ``... report [NAME ...]`` writes."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.ranks import device_type
from benchmarks.record import environment
from evidence import NAMES
from evidence.experiment import SIZES, SMALL, Rows, sweep
from evidence.report import report

DESCRIPTION = """Test the paper's claims. Every setting is a row in OUTPUT/NAME.json as soon as it was measured; a
setting that has a row is not run again, so the same command resumes a sweep that was stopped. "report" writes tables
and figures of the rows into docs/MEASUREMENTS.md."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments of the command; ``names`` without "report", and all of them where none is given."""
    parser = argparse.ArgumentParser("python -m evidence", description=DESCRIPTION)
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
    """Measure, or write the page; return 1 if settings still have no row."""
    chosen = parse(arguments)
    if chosen.report:
        for name in chosen.names:
            print(report(name, chosen.output) or f"{name}: no row in {chosen.output}")
        return 0
    deadline = None if chosen.budget is None else time.monotonic() + chosen.budget
    command = f"python -m evidence --size {chosen.size}"
    used = environment(command, 1, torch.device(device_type()))
    left = {
        name: sweep(
            name, chosen.size, Rows(chosen.output / f"{name}.json"), used, deadline=deadline, workers=chosen.workers
        )
        for name in chosen.names
    }
    for name, settings in left.items():
        if settings:
            print(f"{name}: {len(settings)} settings have no row; the same command resumes with them", file=sys.stderr)
    return 1 if any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
