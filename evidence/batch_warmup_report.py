"""The report of the batch warm-up: examples and updates to a loss, and how they compare to those of fixed batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIXED, BY_HAND, METER = "fixed", "by hand", "meter"
TUNING, REPORTED = 0, (1, 2, 3)
#: Losses above the one at which the runs end, in nats per token, that are reported, too.
ABOVE = (0.6, 0.3, 0.0)
#: Policies with at most this many times the fewest examples are compared by their updates.
NEARLY = (1.05, 1.25)
COLORS = {FIXED: "grey", BY_HAND: "C1", METER: "C0"}


def policy_of(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that all settings of one policy share."""
    names = ("model", "text", "examples", "target", "optimizer", "policy", "batch", "warmup")
    return tuple(fields[name] for name in names)


@dataclass(frozen=True)
class Crossing:
    """The point of a run at which its held-out loss first is at a target.

    Attributes:
        examples, updates: so far; infinite where the loss stays above the target.
        batch, noise: the batch and the noise scale at the evaluation that found the loss at or below the target.
    """

    examples: float
    updates: float
    batch: int | None = None
    noise: float | None = None


def crossing(row: Row, target: float) -> Crossing:
    """Return where a run reaches a target, on a straight line between the two evaluations about it."""
    before, above = (0.0, 0.0), math.inf
    for examples, updates, batch, loss, noise, *_ in row["curve"]:
        if loss <= target:
            share = (above - target) / (above - loss) if math.isfinite(above) else 1.0
            at = [start + share * (end - start) for start, end in zip(before, (examples, updates), strict=True)]
            return Crossing(at[0], at[1], batch, noise)
        before, above = (examples, updates), loss
    return Crossing(math.inf, math.inf)


def worth(row: Row) -> float:
    """Return minus the examples to the target; of a run that ends above it, less than that of any that reaches it."""
    found = crossing(row, row["target"])
    if math.isfinite(found.examples):
        return -found.examples
    last = row["final"]
    return -row["examples"] * (1.0 + last - row["target"]) if math.isfinite(last) else -math.inf


@dataclass(frozen=True)
class Policy:
    """One policy at its best rate, with its best warm-up.

    Attributes:
        warmup: examples.
        rate: at the base batch.
        edge: whether that is the least or the largest rate that was tried.
        rows: the reported ones by seed.
    """

    kind: str
    batch: int
    warmup: int
    rate: float
    edge: bool
    rows: dict[int, Row]

    @property
    def label(self) -> str:
        """Return the name in tables and figures."""
        return (
            f"fixed, {self.batch:,}" if self.kind == FIXED else {BY_HAND: "by hand", METER: "by the meter"}[self.kind]
        )

    def crossings(self, target: float) -> dict[int, Crossing]:
        """Return where each seed reaches a target."""
        return {seed: crossing(row, target) for seed, row in self.rows.items()}

    def means(self, target: float) -> tuple[float, float]:
        """Return the mean examples and updates to a target; infinite unless every seed reaches it."""
        found = self.crossings(target).values()
        return statistics.fmean(one.examples for one in found), statistics.fmean(one.updates for one in found)


def policies(rows: Sequence[Row]) -> list[Policy]:
    """Return the policies whose rate was tuned: the fixed batches in order, then the others."""
    found = []
    for (kind, batch), of in grouped(rows, "policy", "batch").items():
        tuned = [row for row in of if row["seed"] == TUNING]
        if tuned:
            at_best = max(tuned, key=worth)
            rate, warmup = at_best["rate"], at_best["warmup"]
            alike = [row for row in of if row["warmup"] == warmup]
            tried = {row["rate"] for row in alike if row["seed"] == TUNING}
            reported = {row["seed"]: row for row in alike if row["rate"] == rate and row["seed"] in REPORTED}
            found.append(Policy(kind, batch, warmup, rate, rate in (min(tried), max(tried)), reported))
    return sorted(found, key=lambda one: (list(COLORS).index(one.kind), one.batch))


def examples_of_fixed(fixed: Sequence[Crossing], updates: float) -> float | None:
    """Return the examples that fixed batches need if they are to take ``updates``, between two of them on a log scale.

    Those batches do not count that need as many examples as one with fewer updates. None where the updates are fewer
    than those of the quickest batch, or more than those of the thriftiest.
    """
    points: list[tuple[float, float]] = []
    for point in sorted((one.updates, one.examples) for one in fixed if math.isfinite(one.updates)):
        if not points or point[1] < points[-1][1]:
            points.append(point)
    for (fewer, of_fewer), (more, of_more) in pairwise(points):
        if fewer <= updates <= more and fewer < more:
            share = math.log(updates / fewer) / math.log(more / fewer)
            return of_fewer * (of_more / of_fewer) ** share
    return None


def against_fixed(policy: Policy, fixed: Sequence[Policy], target: float) -> list[float]:
    """Return a policy's examples over those of fixed batches at its number of updates, for each seed that has both."""
    ratios = []
    for seed, own in policy.crossings(target).items():
        others = [one.crossings(target)[seed] for one in fixed if seed in one.rows]
        needed = examples_of_fixed(others, own.updates)
        if needed is not None:
            ratios.append(own.examples / needed)
    return ratios


def verdict(found: Sequence[Policy], target: float) -> list[str]:
    """Return the sentences that compare the policies at one target."""
    means = {one.label: one.means(target) for one in found if math.isfinite(one.means(target)[0])}
    if not means:
        return ["No policy reaches this loss with every seed."]
    thriftiest = min(means, key=lambda label: means[label][0])
    fewest = means[thriftiest][0]
    lines = [f"Fewest examples: {thriftiest} ({fewest:,.0f})."]
    for most in NEARLY:
        near = [label for label, (examples, _) in means.items() if examples <= most * fewest]
        quickest = min(near, key=lambda label: means[label][1])
        lines.append(
            f"{len(near)} of {len(found)} policies need at most {most - 1.0:.0%} more; the fewest updates of these: "
            f"{quickest} ({means[quickest][1]:,.0f})."
        )
    fixed = [one for one in found if one.kind == FIXED]
    for policy in found:
        if policy.kind == FIXED:
            continue
        ratios = against_fixed(policy, fixed, target)
        if len(ratios) < len(policy.rows):
            lines.append(f"{policy.label.capitalize()}: outside of what the fixed batches span.")
            continue
        side = "fewer" if max(ratios) < 1.0 else "more" if min(ratios) > 1.0 else "neither fewer nor more"
        lines.append(
            f"{policy.label.capitalize()}: {_spread(ratios, 2)} times the examples of fixed batches at as many "
            f"updates, {side} with every seed."
        )
    return lines


def targets(rows: Sequence[Row]) -> list[float]:
    """Return the losses that are reported."""
    return [rows[0]["target"] + above for above in ABOVE]


def _spread(values: Sequence[float], digits: int = 0) -> str:
    """Return mean, least and largest, and how many values are infinite."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "never"
    mean = f"{statistics.fmean(known):,.{digits}f}"
    if len(known) > 1:
        mean += f" ({min(known):,.{digits}f}–{max(known):,.{digits}f})"
    lost = len(values) - len(known)
    return mean + (f"; {lost} of {len(values)} never" if lost else "")


def _cells(policy: Policy, target: float) -> list[str]:
    found = list(policy.crossings(target).values())
    batches = sorted({one.batch for one in found if one.batch is not None})
    noise = [one.noise for one in found if one.noise is not None]
    return [
        policy.label,
        f"{policy.rate:.3g}{' (edge)' if policy.edge else ''}",
        f"{policy.warmup:,}",
        _spread([one.examples for one in found]),
        _spread([one.updates for one in found]),
        ", ".join(f"{batch:,}" for batch in batches),
        _spread(noise) if noise else "",
    ]


def tables(rows: Sequence[Row]) -> list[str]:
    """For each optimizer and target a table and its verdict, then the batches that the meter chose."""
    lines: list[str] = []
    for (optimizer,), of in grouped(rows, "optimizer").items():
        found = [one for one in policies(of) if one.rows]
        missing = [one.label for one in policies(of) if not one.rows]
        one = of[0]
        lines += [
            f"{optimizer}, {one['text']} in sequences of {one['sequence_length']} tokens, at most {one['examples']:,} "
            f"of them; means over the reported seeds, with the least and the largest. The entropy of the tokens under "
            f"their frequencies is {one['entropy']:.3f}.",
            "",
        ]
        if missing:
            lines += [f"Without a reported seed so far: {', '.join(missing)}.", ""]
        if not found:
            continue
        for target in targets(of):
            lines += [f"To a held-out loss of {target:.2f}:", ""]
            header = [
                "batch", f"rate at batch {one['base_batch']}", "warm-up", "examples", "updates", "batch there",
                "noise scale there",
            ]  # fmt: skip
            lines += table(header, [_cells(policy, target) for policy in found])
            lines += [" ".join(verdict(found, target)), ""]
        chosen = [
            [str(seed), "; ".join(f"{batch:,} from {seen:,}" for seen, batch in row["batches"])]
            for policy in found
            if policy.kind == METER
            for seed, row in sorted(policy.rows.items())
        ]
        if chosen:
            lines += ["The batches that the meter chose, and the examples at which each began:", ""]
            lines += table(["seed", "batches"], chosen)
    return lines[:-1]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Examples against updates to each target, and the meter's batch and noise scale along the run."""
    of = grouped(rows, "optimizer")[(rows[0]["optimizer"],)]
    found = [one for one in policies(of) if one.rows]
    *panels, last = figure.subplots(1, len(ABOVE) + 1)
    for axis, target in zip(panels, targets(of), strict=True):
        _draw_target(axis, found, target)
    panels[0].set_ylabel("examples")
    _draw_batches(last, found)
    for axis in (panels[0], last):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)


def _draw_target(axis: Axes, found: Sequence[Policy], target: float) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    for kind, color in COLORS.items():
        points = []
        for policy in found:
            reached = [one for one in policy.crossings(target).values() if math.isfinite(one.updates)]
            if policy.kind != kind or not reached:
                continue
            axis.plot(
                [one.updates for one in reached], [one.examples for one in reached], ".", color=color, markersize=4
            )
            middle = [
                statistics.fmean(values) for values in zip(*((p.updates, p.examples) for p in reached), strict=True)
            ]
            points.append(middle)
            if kind == FIXED:
                axis.annotate(f"{policy.batch:,}", middle, textcoords="offset points", xytext=(3, 5), fontsize=7)
        if points:
            label = {FIXED: "fixed batches", BY_HAND: "by hand", METER: "by the meter"}[kind]
            axis.plot(*zip(*points, strict=True), "o-", color=color, label=label)
    axis.set(xscale="log", yscale="log", xlabel="updates", title=f"to a loss of {target:.2f}")
    for scale in (axis.xaxis, axis.yaxis):
        scale.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        scale.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        scale.set_minor_locator(NullLocator())


def _draw_batches(axis: Axes, found: Sequence[Policy]) -> None:
    from matplotlib.ticker import StrMethodFormatter

    for policy in found:
        if policy.kind == FIXED:
            continue
        color = COLORS[policy.kind]
        for number, row in enumerate(policy.rows.values()):
            points = [*row["batches"], [row["curve"][-1][0], row["batches"][-1][1]]]
            points = [[seen / 1000.0, batch] for seen, batch in points]
            label = f"batch, {policy.label}" if number == 0 else None
            axis.step(*zip(*points, strict=True), where="post", color=color, linewidth=1.0, label=label)
            if policy.kind == METER:
                noise = [
                    (one[0] / 1000.0, one[4]) for one in row["curve"] if one[4] is not None and math.isfinite(one[4])
                ]
                label = "noise scale" if number == 0 else None
                axis.plot(*zip(*noise, strict=True), ":", color=color, linewidth=1.0, label=label)
    axis.set(xlabel="examples (thousands)", title="batch and noise scale")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
