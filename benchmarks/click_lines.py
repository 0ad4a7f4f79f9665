"""The rate at which click logs are prepared: ``python -m benchmarks.click_lines``, on all flights (docs/DLRM.md)."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import torch

from benchmarks.cpu_update import processor
from benchmarks.pages import table
from benchmarks.timing import Spread
from ds_vrgd_recipes.clicks.criteo import read_file
from ds_vrgd_recipes.clicks.flights import fetch_flights, write_flights
from ds_vrgd_recipes.clicks.prepare import prepare
from ds_vrgd_recipes.clicks.sources import FilesData


def main(arguments: list[str]) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.click_lines", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        train, test = Path(folder, "day_0"), Path(folder, "day_1")
        write_flights(fetch_flights(), train, test, test_every=100)
        print(f"{processor()}, torch {torch.__version__}, pyarrow {pyarrow.__version__}")
        print("\n".join(measure(train, test, Path(folder), chosen.repetitions)))
    return 0


def measure(train: Path, test: Path, work: Path, repetitions: int) -> list[str]:
    """Return lines of a table: reading ``train``, and all of the preparation of both files, in folders of ``work``."""
    folders = iter(work / f"prepared-{number}" for number in range(repetitions))
    data = FilesData(source="files", train=[str(train)], test=[str(test)])
    in_train, in_both = (sum(path.read_bytes().count(b"\n") for path in paths) for paths in ([train], [train, test]))
    rows = [
        _row("read once", in_train, repetitions, lambda: sum(map(len, read_file(train, most_bad=0.0)))),
        _row("prepared", in_both, repetitions, lambda: prepare(data, next(folders), lambda text: None)),
    ]
    return table(["", "lines", "lines a second of the clock (10–90 %)", "of processor time"], rows)


def _row(name: str, lines: int, repetitions: int, run: Callable[[], object]) -> list[str]:
    of_processor, of_clock = [], []
    for _ in range(repetitions):
        clock, used = time.perf_counter(), time.process_time()
        run()
        of_processor.append(lines / (time.process_time() - used))
        of_clock.append(lines / (time.perf_counter() - clock))
    return [name, f"{lines:,}", _thousands(of_clock), _thousands(of_processor)]


def _thousands(rates: list[float]) -> str:
    spread = Spread.of(rates)
    return f"{round(spread.median, -3):,.0f} ({round(spread.p10, -3):,.0f}–{round(spread.p90, -3):,.0f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
