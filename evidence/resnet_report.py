"""Tables and figure of the ResNet experiment."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import draw_spreads, grouped, spread
from evidence.tuning import best

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    several = sorted({row["batch"] for row in rows if row["factor"] != 1.0})
    by = grouped(rows, "optimizer", "batch")
    rule, tuned = [], []
    for name in ORDER:
        rule.append([title(name), *(_cell(_by_rule(by.get((name, batch), []))) for batch in batches)])
        if shape["depth"] == PAPER_DEPTH:
            figures = dict(zip(PAPER_BATCHES, PAPER[name], strict=True))
            rule.append([f"{title(name)}, paper", *(f"{figures[b]:.2f}" if b in figures else "" for b in batches)])
        tuned.append([title(name), *(_at_best(by.get((name, batch), [])) for batch in several)])
    lines = [
        f"Held-out accuracy in per cent, ResNet-{shape['depth']}, {shape['epochs']:g} epochs of {shape['images']:,} "
        f"images, {shape['held_out']:,} held out; median (least–largest) over seeds, with how many. Rate by the "
        "square-root rule from batch 256. (The paper's figures, beside those of its network, are CIFAR-10's.)",
        "",
        *table(["batch", *map(str, batches)], rule),
    ]
    if not several:
        return lines
    return [
        *lines,
        "",
        "The same, each at the best of the factors of that rate that were tried (chosen on the held-out images): the "
        "factor, and of how many.",
        "",
        *table(["batch", *map(str, several)], tuned),
    ]


def _at_best(rows: Sequence[Row]) -> str:
    """One optimizer at one batch."""
    if not rows:
        return ""
    factor, members = best(rows, "factor", accuracy)
    return f"{_cell(members)} at {factor:g} of {len(grouped(rows, 'factor'))}"


def _cell(rows: Sequence[Row]) -> str:
    return f"{spread(accuracies(rows), 2)} [{len(rows)}]" if rows else ""


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Accuracy against batch: by the rule, and the best where several rates were tried; against epochs, by the rule."""
    at_rule = _by_rule(rows)
    panels: dict[str, Callable[[Sequence[Row]], list[Row]]] = {"rate by the square-root rule": _by_rule}
    if len(at_rule) < len(rows):
        panels["the best of several rates"] = _best_of_several
    *axes, by_epoch = figure.subplots(1, len(panels) + 1)
    by = grouped(rows, "optimizer", "batch")
    for axis, (panel, chosen) in zip(axes, panels.items(), strict=True):
        drawn = {place: accuracies(of) for place, found in by.items() if (of := chosen(found))}
        batches = sorted({batch for _, batch in drawn})
        for name in ORDER:
            _points(axis, {batch: drawn[name, batch] for batch in batches if (name, batch) in drawn}, name)
        axis.set(xlabel="batch [images]", xscale="log", title=panel)
        axis.set_xticks(batches, [f"{batch:,}" for batch in batches], rotation=30)
        axis.minorticks_off()
    axes[0].set_ylabel("held-out accuracy at the end [%]\nmedian, range of seeds")
    axes[0].legend(fontsize="small")

    largest = max(row["batch"] for row in at_rule)
    for name in ORDER:
        # Seeds are evaluated at the same epochs, but for one that came apart.
        runs = [row["evaluations"] for row in _by_rule(by.get((name, largest), []))]
        if not runs:
            continue
        points = min(map(len, runs))
        curve = [100.0 * statistics.median(each[place][2] for each in runs) for place in range(points)]
        by_epoch.plot([runs[0][place][0] for place in range(points)], curve, **_style(name))
    by_epoch.set(xlabel="epoch", ylabel="held-out accuracy [%]", title=f"batch {largest:,}, by the rule")


def _by_rule(rows: Sequence[Row]) -> list[Row]:
    """Those at the rate of the square-root rule."""
    return [row for row in rows if row["factor"] == 1.0]


def _best_of_several(rows: Sequence[Row]) -> list[Row]:
    """Those of the best rate, if there is a choice."""
    return best(rows, "factor", accuracy)[1] if len(grouped(rows, "factor")) > 1 else []


def _points(axis: Axes, values: Mapping[int, Sequence[float]], name: str) -> None:
    """Median and range at each batch, every optimizer a little beside the others."""
    if not values:
        return
    beside = 2 ** (0.04 * (ORDER.index(name) - len(ORDER) / 2))
    draw_spreads(axis, [batch * beside for batch in values], list(values.values()), markersize=4, **_style(name))


def _style(name: str) -> dict[str, Any]:
    """Dashed for a base, solid for its twin of the same colour."""
    color = f"C{list(NAMES).index(name.removeprefix('vr_'))}"
    return {"color": color, "linestyle": "-" if name.startswith("vr_") else "--", "label": title(name)}
