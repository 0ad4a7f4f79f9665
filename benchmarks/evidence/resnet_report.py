"""Tables and figure of the ResNet experiment."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.evidence.experiment import Row
from benchmarks.evidence.report import grouped, spread
from benchmarks.evidence.tuning import best
from benchmarks.pages import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"momentum": "Momentum", "adam": "Adam", "lamb": "LAMB", "lars": "LARS"}
# Table 5: test accuracy on CIFAR-10 in per cent, at batches 256, 512, 1k, 2k, 4k, 8k.
PAPER_DEPTH = 56
PAPER_BATCHES = (256, 512, 1024, 2048, 4096, 8192)
PAPER = {
    "momentum": (93.68, 93.56, 93.17, 92.19, 17.40, 14.57),
    "vr_momentum": (93.79, 93.71, 93.50, 93.28, 92.70, 90.57),
    "adam": (91.88, 92.24, 92.02, 91.98, 59.38, 20.74),
    "vr_adam": (92.46, 92.40, 92.43, 92.10, 91.74, 90.86),
    "lamb": (92.08, 92.03, 91.90, 92.13, 58.35, 15.13),
    "vr_lamb": (92.29, 92.34, 92.05, 92.43, 92.04, 91.07),
    "lars": (92.30, 92.29, 92.34, 82.39, 27.50, 12.21),
    "vr_lars": (92.35, 92.53, 92.44, 92.79, 92.35, 91.86),
}
ORDER = tuple(PAPER)


def title(name: str) -> str:
    """Of an optimizer, as the paper writes it."""
    base = NAMES[name.removeprefix("vr_")]
    return f"VR-{base}" if name.startswith("vr_") else base


def accuracies(rows: Sequence[Row]) -> list[float]:
    """In per cent."""
    return [100.0 * row["accuracy"] for row in rows]


def accuracy(row: Row) -> float:
    """By which a rate is chosen: a fraction."""
    return float(row["accuracy"])


def tables(rows: Sequence[Row]) -> list[str]:
    """By the square-root rule, and each at its own best rate; the paper's beside them."""
    shape, batches = rows[0], sorted({row["batch"] for row in rows})
    by = grouped(rows, "optimizer", "batch")
    rule, tuned = [], []
    for name in ORDER:
        line, own = [], []
        for batch in batches:
            found = by.get((name, batch), [])
            at_rule = [row for row in found if row["factor"] == 1.0]
            line.append(_cell(at_rule))
            if found:
                factor, members = best(found, "factor", accuracy)
                tried = len({row["factor"] for row in found})
                own.append(f"{_cell(members)} at {factor:g} of {tried}")
            else:
                own.append("")
        rule.append([title(name), *line])
        if shape["depth"] == PAPER_DEPTH:
            figures = dict(zip(PAPER_BATCHES, PAPER[name], strict=True))
            rule.append([f"{title(name)}, paper", *(f"{figures[b]:.2f}" if b in figures else "" for b in batches)])
        tuned.append([title(name), *own])
    lines = [
        f"Held-out accuracy in per cent, ResNet-{shape['depth']}, {shape['epochs']:g} epochs of {shape['images']:,} "
        f"images, {shape['held_out']:,} held out; median (least–largest) over seeds, with how many. Rate by the "
        "square-root rule from batch 256. (The paper's figures, beside those of its network, are CIFAR-10's.)",
        "",
        *table(["batch", *map(str, batches)], rule),
    ]
    if {row["factor"] for row in rows} == {1.0}:
        return lines
    return [
        *lines,
        "",
        "The same, each at the best of the factors of that rate that were tried (chosen on the held-out images, of one "
        "seed): the factor, and of how many.",
        "",
        *table(["batch", *map(str, batches)], tuned),
    ]


def _cell(rows: Sequence[Row]) -> str:
    return f"{spread(accuracies(rows), 2)} [{len(rows)}]" if rows else ""


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Accuracy against batch, or against rate where there is one batch, and against epochs at the largest batch."""
    at_rule = [row for row in rows if row["factor"] == 1.0]
    field, shown = ("batch", at_rule) if len({row["batch"] for row in rows}) > 1 else ("factor", rows)
    by_field, by_epoch = figure.subplots(1, 2)
    largest = max(row["batch"] for row in at_rule)
    for (name,), members in grouped(at_rule, "optimizer").items():
        color = f"C{list(NAMES).index(name.removeprefix('vr_'))}"
        style = {"color": color, "linestyle": "-" if name.startswith("vr_") else "--", "label": title(name)}
        values = grouped([row for row in shown if row["optimizer"] == name], field)
        places = sorted(value for (value,) in values)
        by_field.plot(places, [statistics.median(accuracies(values[place,])) for place in places], marker="o", **style)
        # Seeds are evaluated at the same epochs, but for one that came apart.
        longest = [row["evaluations"] for row in members if row["batch"] == largest]
        if not longest:
            continue
        points = min(map(len, longest))
        epochs = [longest[0][place][0] for place in range(points)]
        curve = [100.0 * statistics.median(each[place][2] for each in longest) for place in range(points)]
        by_epoch.plot(epochs, curve, **style)
    by_field.set_xscale("log", base=2)
    by_field.set_xlabel("batch [images]" if field == "batch" else "rate [that of the square-root rule]")
    by_field.set_ylabel("held-out accuracy at the end [%]")
    by_field.legend(fontsize="small")
    by_epoch.set_xlabel("epoch")
    by_epoch.set_ylabel("held-out accuracy [%]")
    by_epoch.set_title(f"batch {largest}")
    figure.suptitle("Rate by the square-root rule; median over seeds; dashed: base, solid: variance-reduced")
