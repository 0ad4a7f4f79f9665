"""The tables and the figure of ``evidence.branches``: the critical batch of the branches, and the noise scale."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import draw_spreads, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SAME, SQUARE_ROOT = "same", "sqrt"
TOLERANCE = 0.01  # nats a token
TOLERANCES = (0.005, TOLERANCE, 0.02, 0.05)


@dataclass(frozen=True)
class Critical:
    """A critical batch.

    Attributes:
        batch: in sequences.
        bound: "≥" if no larger batch was tried, "≤" if a batch smaller than the trunk's is better by more than the
            tolerance, so that the trunk's own is too large; otherwise empty.
    """

    batch: int
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.batch:,}"


def critical_batch(excess: Mapping[int, float], trunk: int, tolerance: float) -> Critical:
    """Return the largest batch whose loss is above that of the trunk's batch by no more than the tolerance.

    Args:
        excess: loss minus that of the trunk's batch, by batch; NaN where a branch came apart. The trunk's own is 0.
        trunk: the trunk's batch.
        tolerance: not negative, in nats.
    """
    of_all = {**excess, trunk: 0.0}
    largest = max(batch for batch, above in of_all.items() if above <= tolerance)
    if any(above < -tolerance for batch, above in of_all.items() if batch < trunk):
        return Critical(largest, "≤")
    return Critical(largest, "≥" if largest == max(of_all) else "")


def predicted_batch(trunk: int, noise_scale: float, share: float) -> float:
    """Return the critical batch that a noise scale predicts: the one that loses a share of the trunk batch's progress.

    By McCandlish et al. (2018), eq. 2.7, the progress of a given number of examples is proportional to
    1 / (B + B_noise). So a share s is lost at B = (b + s B_noise) / (1 - s), where b is the trunk's batch.
    """
    return (trunk + share * noise_scale) / (1.0 - share) if share < 1.0 else math.inf


def fitted_batch(excess: Mapping[int, float], trunk: int, progress: float) -> float:
    """Return the B_crit of the least squares of the progress of all batches, proportional to 1 / (B + B_crit).

    Args:
        excess: as of :func:`critical_batch`.
        progress: fall of the loss with the trunk's batch.

    Returns:
        Infinity where the progress is not positive, or no batch makes less of it, so that the fit has no end.
    """
    if not progress > 0.0:
        return math.inf
    kept = {batch: 1.0 - above / progress for batch, above in excess.items() if math.isfinite(above)}

    def squares(critical: float) -> float:
        return sum((share - (trunk + critical) / (batch + critical)) ** 2 for batch, share in kept.items())

    tried: list[float] = [2.0 ** (power / 20) for power in range(400)]
    found = min(tried, key=squares)
    return found if found < tried[-1] else math.inf


def best_excess(point: Row) -> dict[int, float]:
    """Return the excess of each batch at the better of its rates, by batch; infinite if both came apart."""
    branches = [one for one in point["branches"] if one["order"] == "same"]
    of_batches = grouped(branches, "batch").items()
    return {batch: min(_finite(one["excess"]) for one in of) for (batch,), of in sorted(of_batches)}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


@dataclass(frozen=True)
class Case:
    """One model and optimizer at one point, with all seeds.

    Attributes:
        trunk: the trunk's batch.
        points: the results at the point, one of each seed.
    """

    model: str
    optimizer: str
    rate: float
    trunk: int
    points: list[Row]

    @property
    def name(self) -> str:
        """Return the model, the optimizer and the update."""
        return f"{self.model}, {self.optimizer}, {self.points[0]['update']:,}"

    @property
    def noise_scale(self) -> float:
        """Return the median over the seeds; infinite where the signal is lost in the noise."""
        scales: list[float] = [point["scale"] for point in self.points]
        return statistics.median(scales)

    def critical(self, tolerance: float) -> list[Critical]:
        """Return the critical batch of each seed, in ascending order."""
        found = [critical_batch(best_excess(point), self.trunk, tolerance) for point in self.points]
        return sorted(found, key=lambda one: one.batch)

    def middle(self, tolerance: float) -> Critical:
        """Return the median of the seeds, the lower one of two."""
        found = self.critical(tolerance)
        return found[(len(found) - 1) // 2]

    @property
    def fitted(self) -> list[float]:
        """Return the B_crit of each seed's fit, in ascending order."""
        return sorted(
            fitted_batch(best_excess(point), self.trunk, point["before"] - point["loss"]) for point in self.points
        )

    @property
    def progress(self) -> float:
        """Return the fall of the loss in the window with the trunk's batch, the median over the seeds."""
        falls: list[float] = [point["before"] - point["loss"] for point in self.points]
        return statistics.median(falls)

    def predicted(self, tolerance: float) -> float:
        """Return the critical batch that the noise scale predicts."""
        share = tolerance / self.progress if self.progress > 0.0 else math.inf
        return predicted_batch(self.trunk, self.noise_scale, share)


def cases(rows: Sequence[Row]) -> list[Case]:
    """Return the cases by model, optimizer and point."""
    found = []
    branched = [row for row in rows if row["at_points"]]
    for (model, optimizer, rate, batch), of_trunk in grouped(branched, "model", "optimizer", "rate", "batch").items():
        for points in zip(*(row["at_points"] for row in of_trunk), strict=True):
            found.append(Case(model, optimizer, rate, batch, list(points)))
    return found


def repeated(of: Sequence[Case]) -> list[Row]:
    """Return the branches that repeat the trunk's batch with the examples in another order."""
    return [one for case in of for point in case.points for one in point["branches"] if one["order"] == "other"]


def tables(rows: Sequence[Row]) -> list[str]:
    """Both numbers at each point; the noise of the comparison; other tolerances; every branch; the trunks' rates."""
    of = cases(rows)
    lines = []
    if of:
        header = [
            "model, optimizer, update", "rate", "held-out loss", "its fall in the window", "noise scale",
            "its 95 % intervals", f"critical batch, tolerance {TOLERANCE:g}", "noise scale / critical batch",
            "B_crit of the fit", "noise scale / B_crit",
        ]  # fmt: skip
        lines += ["In sequences; medians over the seeds, and in brackets the least and the largest:", ""]
        lines += [*table(header, [_compared(case) for case in of]), *_noise(of)]
        lines += [
            "The critical batch at other tolerances in nats, and in brackets the one that the noise scale predicts at "
            "that tolerance, (b + s B_noise) / (1 - s), where s is the tolerance over the fall of the loss in the "
            "window and b the trunk's batch:",
            "",
            *table(
                ["model, optimizer, update", *(f"{tolerance:g}" for tolerance in TOLERANCES), "half of the fall"],
                [_sensitivity(case) for case in of],
            ),
            "The loss of every batch minus that of the trunk's batch, with the trunk's rate (same) and with that times "
            "the square root of the batches' ratio (sqrt):",
            "",
        ]
        for trunk in dict.fromkeys(case.trunk for case in of):
            alike = [case for case in of if case.trunk == trunk]
            batches = sorted(best_excess(alike[0].points[0]))
            header = ["model, optimizer, update, rate", *(f"{batch:,}" for batch in batches)]
            lines += table(header, [line for case in alike for line in _branches(case, batches)])
    tuning = [row for row in rows if not row["at_points"]]
    if tuning:
        lines += ["The trunk's held-out loss at the last point at each rate, with one seed:", ""]
        body = [
            [f"{model}, {optimizer}", ", ".join(f"{rate:g}: {final:.3f}" for rate, final in _finals(of_trunk))]
            for (model, optimizer), of_trunk in grouped(tuning, "model", "optimizer").items()
        ]
        lines += table(["model, optimizer", "rate: loss"], body)
    return lines[:-1]


def _finals(rows: Sequence[Row]) -> list[tuple[float, float]]:
    return sorted((row["rate"], row["final"]) for row in rows)


def _compared(case: Case) -> list[str]:
    scales = sorted(point["scale"] for point in case.points)
    critical = case.critical(TOLERANCE)
    middle = case.middle(TOLERANCE)
    fitted = case.fitted
    low, high = min(point["low"] for point in case.points), max(point["high"] for point in case.points)
    return [
        case.name,
        f"{case.rate:g}",
        f"{statistics.median(point['before'] for point in case.points):.3f}",
        f"{case.progress:.3f}",
        _spread(scales),
        f"{_number(low)}–{_number(high)}",
        f"{middle} ({critical[0]}–{critical[-1]})",
        _ratio(case.noise_scale, middle.batch),
        _spread(fitted),
        _ratio(case.noise_scale, statistics.median(fitted)),
    ]


def _spread(ordered: Sequence[float]) -> str:
    return f"{_number(statistics.median(ordered))} ({_number(ordered[0])}–{_number(ordered[-1])})"


def _ratio(noise_scale: float, batch: float) -> str:
    if not math.isfinite(noise_scale):
        return "lost in the noise"
    return f"{noise_scale / batch:.2f}" if math.isfinite(batch) else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "∞"


def _noise(of: Sequence[Case]) -> list[str]:
    again = [one["excess"] for one in repeated(of)]
    errors = [one["error"] for case in of for point in case.points for one in point["branches"]]
    known = [value for value in errors if math.isfinite(value)]
    spread = math.sqrt(statistics.fmean(value**2 for value in again))
    return [
        f"The noise of the comparison: a branch with the trunk's batch and the same examples in another order differs "
        f"by {spread:.4f} nats (root mean square of {len(again)}; at most {max(map(abs, again)):.4f}). The standard "
        f"error over the held-out sequences, paired, is at most {max(known):.4f}, and {statistics.median(known):.4f} "
        "in the median.",
        "",
    ]


def _sensitivity(case: Case) -> list[str]:
    half = max(0.0, case.progress / 2.0)
    return [
        case.name,
        *(
            f"{case.middle(tolerance)} ({_number(case.predicted(tolerance))})"
            for tolerance in (*TOLERANCES, half)
        ),
    ]  # fmt: skip


def _branches(case: Case, batches: Sequence[int]) -> list[list[str]]:
    lines = []
    for rate in (SAME, SQUARE_ROOT):
        cells = []
        for batch in batches:
            values = [
                _finite(one["excess"])
                for point in case.points
                for one in point["branches"]
                if (one["batch"], one["rate"], one["order"]) == (batch, rate, "same")
            ]
            median = statistics.median(values)
            cells.append(f"{median:+.3f}" if math.isfinite(median) else "apart")
        lines.append([f"{case.name}, {rate}", *cells])
    return lines


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Excess against batch, a panel for each model and optimizer; then the critical batch against the noise scale."""
    of = cases(rows)
    panels: dict[tuple[str, str], list[Case]] = {}
    for case in of:
        panels.setdefault((case.model, case.optimizer), []).append(case)
    models = list(dict.fromkeys(case.model for case in of))
    optimizers = list(dict.fromkeys(case.optimizer for case in of))
    grid = figure.subplots(max(1, len(models)), len(optimizers) + 1, squeeze=False)
    for axis in grid.flatten():
        axis.set_axis_off()
    for (model, optimizer), members in panels.items():
        axis = grid[models.index(model)][optimizers.index(optimizer)]
        axis.set_axis_on()
        _draw_excess(axis, members)
        axis.set(title=f"{model}, {optimizer}, rate {members[0].rate:g}")
    for model, line in zip(models, grid, strict=False):
        line[-1].set_axis_on()
        _draw_both(line[-1], [case for case in of if case.model == model], optimizers)
        line[0].set_ylabel("held-out loss minus that of the trunk's batch, nats")


def _draw_excess(axis: Axes, members: Sequence[Case]) -> None:
    for number, case in enumerate(members):
        of_seeds = [{**best_excess(point), case.trunk: 0.0} for point in case.points]
        batches = [batch for batch in sorted(of_seeds[0]) if all(math.isfinite(one[batch]) for one in of_seeds)]
        color = f"C{number}"
        label = f"update {case.points[0]['update']:,}, loss {statistics.median(p['before'] for p in case.points):.2f}"
        draw_spreads(axis, batches, [[one[batch] for one in of_seeds] for batch in batches], color=color, label=label)
        low, high = min(point["low"] for point in case.points), max(point["high"] for point in case.points)
        if low > 0.0 and math.isfinite(high):
            axis.axvspan(low, high, color=color, alpha=0.2, linewidth=0)
    axis.axhline(TOLERANCE, color="grey", linestyle="--", linewidth=0.8, label=f"tolerance {TOLERANCE:g}")
    axis.set_xscale("log", base=2)
    axis.set_yscale("symlog", linthresh=TOLERANCE)
    axis.set_xlabel("batch (sequences); band: noise scale, 95 % intervals")
    axis.legend(fontsize=7)


def _draw_both(axis: Axes, of: Sequence[Case], optimizers: Sequence[str]) -> None:
    seen = [case for case in of if math.isfinite(case.noise_scale)]
    ends = [1.0, 2.0] if not seen else []
    for place, optimizer in enumerate(optimizers):
        own = [case for case in seen if case.optimizer == optimizer]
        scales = [case.noise_scale for case in own]
        by_rule, by_fit = (
            [case.middle(TOLERANCE).batch for case in own],
            [statistics.median(case.fitted) for case in own],
        )
        for found, line, how in ((by_rule, "-", f"tolerance {TOLERANCE:g}"), (by_fit, ":", "fit")):
            marker, color, label = "os"[place % 2], f"C{place + 3}", f"{optimizer}, {how}"
            axis.plot(scales, found, marker=marker, color=color, linestyle=line, label=label)
            ends += [*scales, *(value for value in found if math.isfinite(value))]
    axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linewidth=0.8, label="equal")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set(xlabel="noise scale of the meter (sequences)", ylabel="critical batch (sequences)")
    axis.legend(fontsize=7)
