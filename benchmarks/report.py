"""Write the tables of docs/MEASUREMENTS.md: ``python -m benchmarks.report results``.

A section a run, so that figures stand beside those that were measured with them; every ratio is within one run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import pretraining_table
from benchmarks.contenders import BARE, CONTENDERS
from benchmarks.pages import DOCS, replace_between, table
from benchmarks.plan import STAGES
from benchmarks.record import read_runs

Row = dict[str, Any]
UNKNOWN = "–"
_PARTS = ("forward", "backward", "step", "host step")

#: The contenders of ``benchmarks.megatron``: how the table calls them, which is the name of ours.
MEGATRON = {"megatron-adamw": "torch fused AdamW", "megatron-vrlamb": "VRLAMB", "megatron-lamb": "LAMB"}


def milliseconds(spread: dict[str, float]) -> str:
    """Return the median and, in brackets, the 10th to 90th percentile."""
    digits = 1 if spread["median"] >= 0.1 else 2 if spread["median"] >= 0.01 else 3
    median, low, high = (f"{spread[key] * 1e3:.{digits}f}" for key in ("median", "p10", "p90"))
    return f"{median} ({low}–{high})"


def ratio(row: Row | None, to: Row | None) -> str:
    """Return the ratio of the medians of two whole steps, where both were measured."""
    if row is None or to is None or not row["seconds"] or not to["seconds"]:
        return UNKNOWN
    return f"{row['seconds']['total']['median'] / to['seconds']['total']['median']:.2f}"


def extra_bytes(row: Row, reference: Row | None, ranks: int) -> float | None:
    """Return bytes that ``row`` keeps between two steps beyond ``reference``, per parameter of a rank's shard.

    At stage 0 the shard is the whole model. Of the rank that keeps most.
    """
    if reference is None or not row["memory"] or not reference["memory"]:
        return None
    cut = bool(row["stage"]) or CONTENDERS[row["contender"]].engine == "fsdp2"
    shard = row["parameters"] / (ranks if cut else 1)
    kept, kept_by_reference = (
        max(memory["between_steps"] - memory["before"] for memory in one["memory"]) for one in (row, reference)
    )
    return float((kept - kept_by_reference) / shard)


def section(run: dict[str, Any]) -> list[str]:
    """Return the lines of one run."""
    environment = run["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lines = [
        f"## {environment['date']}: {environment['ranks']} x {environment['card']}",
        "",
        f"`{environment['command']}`",
        "",
        f"{versions}.",
        "",
    ]
    lines += _collectives(run["collectives"]) if run["collectives"] else []
    lines += _kernels(run["kernels"]) if run["kernels"] else []
    lines += _steps(run["steps"], environment["ranks"]) if run["steps"] else []
    lines += _megatron(run["megatron"], environment["ranks"]) if run.get("megatron") else []
    lines += pretraining_table.lines(run["pretraining"]) if run.get("pretraining") else []
    return lines


def _collectives(rows: list[Row]) -> list[str]:
    body = [[row["name"], f"{row['elements'] / 1e6:.2f}", milliseconds(row["seconds"])] for row in rows]
    return ["### Collectives", "", *table(["collective", "million elements", "ms (10–90 %)"], body)]


def _kernels(rows: list[Row]) -> list[str]:
    body = [
        [
            row["name"],
            f"{row['elements'] / 1e6:.1f}",
            f"{row['bytes_per_element']:g}",
            milliseconds(row["seconds"]) if row["seconds"] else "failed",
            f"{row['floor_seconds'] * 1e3:.3f}",
            f"{row['seconds']['median'] / row['floor_seconds']:.2f}" if row["seconds"] else UNKNOWN,
        ]
        for row in rows
    ]
    header = ["kernel", "million elements", "bytes an element", "ms (10–90 %)", "floor, ms", "x the floor"]
    bandwidth = rows[0]["copy_bytes_per_second"] / 1e9
    return [
        "### Kernels",
        "",
        f"The floor is the bytes at the speed of a large copy, {bandwidth:.0f} GB/s read and written.",
        "",
        *table(header, body),
    ]


def _steps(rows: list[Row], ranks: int) -> list[str]:
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += _steps_of_model([row for row in rows if row["model"] == model], ranks)
    return lines + _failures(rows)


def _steps_of_model(rows: list[Row], ranks: int) -> list[str]:
    names = list(CONTENDERS)

    def place(row: Row) -> tuple[int, int, int]:
        stage = -1 if row["stage"] is None else STAGES.index(row["stage"])
        return stage, row["accumulation"], names.index(row["contender"])

    body = []
    for row in sorted(rows, key=place):
        of_contender = CONTENDERS[row["contender"]]
        reference = _find(rows, row["stage"], row["accumulation"], of_contender.peer)
        bare = _find(rows, None, row["accumulation"], BARE)
        extra = None if of_contender.engine is None else extra_bytes(row, reference, ranks)
        seconds, memory = row["seconds"], row["memory"]
        body.append(
            [
                CONTENDERS[row["contender"]].label,
                UNKNOWN if row["stage"] is None else str(row["stage"]),
                str(row["accumulation"]),
                milliseconds(seconds["total"]) if seconds else "failed",
                *(f"{seconds[part]['median'] * 1e3:.1f}" if seconds else UNKNOWN for part in _PARTS),
                UNKNOWN if of_contender.engine is None else ratio(row, reference),
                ratio(row, bare),
                f"{max(one['peak'] for one in memory) / 1e9:.2f}" if memory else UNKNOWN,
                UNKNOWN if extra is None else f"{extra:+.2f}",
            ]
        )
    header = ["", "stage", "accum.", "step, ms (10–90 %)", "forward", "backward", "`step()`", "its host time"]
    header += ["/ AdamW", "/ bare", "peak, GB", "extra bytes"]
    micro_batches = sorted({row["micro_batch"] for row in rows})
    title = f"### Steps: BERT-{rows[0]['model']}, micro-batch {', '.join(map(str, micro_batches))} a rank"
    return [title, "", *table(header, body)]


def _megatron(rows: list[Row], ranks: int) -> list[str]:
    first, body = rows[0], []
    for row in rows:
        low, high = row["interval"]
        of_adamw = next(other for other in rows if other["contender"] == "megatron-adamw")
        body.append(
            [
                MEGATRON[row["contender"]],
                str(row["accumulation"]),
                milliseconds(row["seconds"]["total"]),
                *(f"{row['seconds'][part]['median'] * 1e3:.1f}" for part in _PARTS),
                f"{median(row['ratios']):.3f} ({low:.3f}–{high:.3f})",
                f"{(row['held_bytes'] - of_adamw['held_bytes']) * ranks / row['parameters']:+.2f}",
            ]
        )
    header = ["", "accum.", "step, ms (10–90 %)", "forward", "backward", "`step()`", "its host time"]
    header += ["/ AdamW (95 %)", "extra bytes"]
    title = f"### Megatron-Core: {first['model']}, {first['parameters'] / 1e6:.0f} M parameters, micro-batch "
    title += f"{first['micro_batch']} x {first['length']} a rank, {len(first['ratios'])} rounds"
    return [title, "", *table(header, body)]


def _find(rows: Iterable[Row], stage: int | None, accumulation: int, contender: str) -> Row | None:
    for row in rows:
        if (row["stage"], row["accumulation"], row["contender"]) == (stage, accumulation, contender):
            return row
    return None


def _failures(rows: list[Row]) -> list[str]:
    """Return the last line of each error, once, with its configurations."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["failure"]:
            last = row["failure"].strip().splitlines()[-1]
            where = f"stage {row['stage']}, accumulation {row['accumulation']}"
            found.setdefault((row["contender"], last), []).append(where)
    lines = [
        f"- {CONTENDERS[contender].label} failed ({'; '.join(places)}): `{text}`"
        for (contender, text), places in found.items()
    ]
    return [*lines, ""] if lines else []


def main(arguments: list[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser("python -m benchmarks.report", description="Write docs/MEASUREMENTS.md.")
    parser.add_argument("results", type=Path, help="the folder that python -m benchmarks wrote")
    parser.add_argument("--page", type=Path, default=DOCS / "MEASUREMENTS.md")
    chosen = parser.parse_args(arguments)
    runs = read_runs(chosen.results)
    if not runs:
        print(f"no run-*.json in {chosen.results}; python -m benchmarks writes them", file=sys.stderr)
        return 2
    replace_between(chosen.page, "results", [line for run in runs for line in section(run)])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
