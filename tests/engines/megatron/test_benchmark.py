"""``python -m benchmarks.megatron`` on a tiny model; no test here looks at a time."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.ranks import Rank
from benchmarks.record import Record, environment, read_runs
from tests.engines.megatron.ranks import on_ranks
from tests.support.ranks import DEVICE

pytestmark = pytest.mark.slow


def measured(rank: int, folder: str) -> None:
    from benchmarks import megatron

    device = torch.device(DEVICE, rank if DEVICE == "cuda" else None)
    chosen = argparse.Namespace(model="tiny", accumulations=[1, 2], rounds=5)
    record = Record(Path(folder, "run-1.json") if rank == 0 else None, environment("-", 2, device))
    megatron.run(Rank(rank, 2, device), chosen, record)


def test_every_contender_has_its_row_and_a_line_of_the_report(tmp_path: Path) -> None:
    on_ranks(2, "test_benchmark.measured", str(tmp_path))
    (run,) = read_runs(tmp_path)
    rows: list[dict[str, Any]] = run["megatron"]
    assert [(row["contender"], row["accumulation"]) for row in rows] == [
        (c, a) for a in (1, 2) for c in report.MEGATRON
    ]
    for row in rows:
        assert len(row["ratios"]) == 5
        assert row["seconds"]["total"]["count"] == 5 * 4
        # Random tokens of 64, which a few steps do not learn.
        assert 3.0 < row["loss"] < 6.0
        assert row["contender"] != "megatron-adamw" or row["ratios"] == [1.0] * 5
    text = "\n".join(report.section(run))
    for label in report.MEGATRON.values():
        assert text.count(f"| {label} |") == 2
    assert "Megatron-Core 0." in text
