"""What the rows on generalisation say: two tables, and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped, spread
from evidence.tuning import best

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {
    "sgd": "SGD",
    "vr": "VR-SGD",
    "independent": "VR-SGD, r of other samples",
    "averaged": "averaged r (VRAdam, VRLAMB)",
}
WHICH = {"measured": "measured", "predicted": "equation 5, r as measured", "unbiased": "equation 5, without bias"}
BIN = 2.0  # of training accuracy, percentage points
APART = 50.0  # training accuracy at the end, percent, of a run that came apart: of ten classes
COLORS = {"Momentum": "C0", "VRMomentum": "C1", "LARS": "C2", "VRLARS": "C3"}


def _parts(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    return [row for row in rows if row["part"] == "step"], [row for row in rows if row["part"] == "gap"]


def best_rate(rows: Sequence[Row]) -> list[Row]:
    """The runs at the rate with the best median test accuracy."""
    return best(rows, "rate", lambda run: float(run["test"]))[1]


def tables(rows: Sequence[Row]) -> list[str]:
    """The ratio by training, sample and step; accuracies and gap by optimizer, at its best rate."""
    steps, gaps = _parts(rows)
    lines: list[str] = []
    if steps:
        body = [
            [
                f"{epochs} epochs, {source}",
                label,
                *(spread([run[f"{kind}_{which}"] for run in runs]) for which in WHICH),
            ]
            for (source, epochs), runs in grouped(steps, "source", "epochs").items()
            for kind, label in KINDS.items()
        ]
        one = steps[0]
        lines += [
            f"Change of the loss on others / on the {one['n']} of the step (k = {one['k']}, rate {one['rate']:g}), "
            f"means over {one['draws']} draws, while the weights stand still; samples seen in training before, or "
            f"fresh. The averaged r is over the draws so far, of which {one['warm_up']} came before, with beta3 "
            f"{one['beta3']:g}:",
            "",
            *table(["weights, samples", "step", *WHICH.values()], body),
        ]
    if gaps:
        body = []
        for (optimizer,), of in sorted(grouped(gaps, "optimizer").items()):
            runs = best_rate(of)
            cells = [spread([run[name] for run in runs], 2) for name in ("train", "test", "gap")]
            by_rate = "; ".join(
                f"{rate:g}: {statistics.median(run['test'] for run in each):.2f}, "
                f"{statistics.median(run['gap'] for run in each):.2f}"
                for (rate,), each in sorted(grouped(of, "rate").items())
            )
            body.append([optimizer, f"{runs[0]['rate']:g}", *cells, by_rate])
        one = gaps[0]
        header = ["optimizer", "best rate", "training accuracy, %", "test accuracy, %", "gap"]
        lines += [
            f"{one['images']:,} images, batch {one['batch']:,}, k = {one['k']}, {one['epochs']} epochs:",
            "",
            *table([*header, "rate: test accuracy, gap"], body),
            *_at_equal_accuracy(gaps),
        ]
    return lines


def _at_equal_accuracy(gaps: Sequence[Row]) -> list[str]:
    """Gaps along the trainings, of all rates and seeds, by training accuracy: where a training stops does not count."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in gaps:
        if row["train"] < APART:
            continue
        bins = found.setdefault(row["optimizer"], {})
        for _, train, test in row["curve"]:
            bins.setdefault(int(train // BIN), []).append(train - test)
    shared = sorted(
        place for place in set().union(*found.values()) if all(len(of.get(place, ())) >= 3 for of in found.values())
    )
    body = [[name, *(spread(of[place], 2) for place in shared)] for name, of in sorted(found.items())]
    header = ["gap at a training accuracy of", *(f"{BIN * place:g}–{BIN * (place + 1):g} %" for place in shared)]
    return ["Along the trainings, all rates and seeds:", "", *table(header, body)] if shared else []


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Measured against predicted ratio; gap against training accuracy, along the runs and at their ends."""
    steps, gaps = _parts(rows)
    axes = figure.subplots(1, 2 + len(grouped(gaps, "optimizer")) // 2)
    for axis, which in zip(axes, ("unbiased", "predicted"), strict=False):
        for color, (kind, label) in enumerate(KINDS.items()):
            for source, marker in (("fresh", "o"), ("seen", "x")):
                of = [row for row in steps if row["source"] == source]
                places = [row[f"{kind}_{which}"] for row in of]
                axis.scatter(
                    places, [row[f"{kind}_measured"] for row in of], 18, f"C{color}", marker, label=f"{label}, {source}"
                )
        ends = [min(row["sgd_measured"] for row in steps), 1.0]
        axis.plot(ends, ends, color="grey", linewidth=0.8)
        axis.set(xlabel=f"ratio by {WHICH[which]}", ylabel="ratio measured over one step")
    axes[1].legend(fontsize=6)  # for both: there it hides no point
    for axis, pair in zip(axes[2:], (("Momentum", "VRMomentum"), ("LARS", "VRLARS")), strict=False):
        for name in pair:
            of = [row for row in gaps if row["optimizer"] == name]
            points = [(train, train - test) for row in of for _, train, test in row["curve"]]
            axis.scatter(*zip(*points, strict=True), s=4, color=COLORS[name], alpha=0.5, label=f"{name}, all rates")
            runs = best_rate(of)
            axis.scatter(
                [run["train"] for run in runs],
                [run["gap"] for run in runs],
                40,
                COLORS[name],
                "*",
                label="the end, at its best rate",
            )
        axis.set(xlabel="training accuracy, %", ylabel="gap, percentage points")
        axis.legend(fontsize=6)
