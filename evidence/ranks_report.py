"""The tables of docs/RANKS.md, and a figure, from the rows of the injected faults."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the false alarms, and for every fault what was told of it on how many ranks."""
    clean = [row for row in rows if row["kind"] == "clean"]
    lines = table(
        ("training", "ranks", "seed", "steps without a fault", "false alarms"),
        [
            (row["training"], *(f"{row[name]:,}" for name in ("ranks", "seed", "steps")), str(len(row["alarms"])))
            for row in clean
        ],
    )
    faulty = [row for row in rows if row["kind"] == "faults"]
    ranks = sorted({row["ranks"] for row in faulty})
    body = []
    for training, of_training in grouped(faulty, "training").items():
        cases = [{**outcome, "ranks": row["ranks"]} for row in of_training for outcome in row["outcomes"]]
        for (fault, where), of_fault in grouped(cases, "fault", "where").items():
            by_ranks = grouped(of_fault, "ranks")
            numel = of_fault[0]["numel"]
            body.append((
                *training, fault, "the whole" if where == "whole" else f"{numel:,}",
                *[_cell(by_ranks.get((k,), [])) for k in ranks],
            ))  # fmt: skip
    return [
        *lines,
        *table(("training", "fault", "elements", *[f"{k} ranks" for k in ranks]), body),
        f"Seeds: {len({row['seed'] for row in faulty})}. A cell: told of how many, of these the right rank, the right "
        "kind; steps until told, median. Before the faults there were "
        f"{sum(row['steps'] for row in faulty):,} steps without one, and "
        f"{sum(len(row['alarms']) for row in faulty)} false alarms.",
    ]


def _cell(outcomes: Sequence[Row]) -> str:
    told = [outcome for outcome in outcomes if outcome["steps"] is not None]
    if not outcomes:
        return "-"
    if not told:
        return f"0/{len(outcomes)}"
    right, kind = (sum(outcome[name] for outcome in told) for name in ("rank", "kind"))
    return f"{len(told)}/{len(outcomes)}, {right}, {kind}; {statistics.median(o['steps'] for o in told):.0f}"


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw the steps until a fault was told, by kind, a panel for each number of ranks."""
    faulty = [row for row in rows if row["kind"] == "faults"]
    panels = grouped(sorted(faulty, key=lambda row: row["ranks"]), "ranks")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, ((ranks,), of_ranks) in zip(axes, panels.items(), strict=True):
        cases = [outcome for row in of_ranks for outcome in row["outcomes"] if not outcome["fault"].startswith("bit")]
        groups = grouped(cases, "fault")
        for place, outcomes in enumerate(groups.values()):
            told = [outcome["steps"] for outcome in outcomes if outcome["steps"] is not None]
            share = len(told) / len(outcomes)
            axis.barh(place, statistics.median(told) if told else 0.0, color="C0", alpha=0.2 + 0.8 * share)
            axis.text(0.5, place, f"{share:.0%}", va="center", fontsize=7)
        axis.set(title=f"{ranks} ranks", xlabel="steps until told")
        axis.set_yticks(range(len(groups)), [fault for (fault,) in groups])
