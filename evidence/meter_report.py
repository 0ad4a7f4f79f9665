"""What the rows of the meter's check say: its tables and its figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rates = Callable[[str], list[float]]


@dataclass(frozen=True)
class Tuned:
    """One batch at the rate whose median over the seeds is best.

    Attributes:
        edge: whether that is the smallest or the largest rate that was tried.
        updates: of every seed; infinite where the rate took far longer than another one.
    """

    batch: int
    rate: float
    edge: bool
    updates: list[float]

    @property
    def examples(self) -> float:
        """Median over the seeds."""
        return self.batch * statistics.median(self.updates)


def tuned(rows: Sequence[Row], rates: Rates) -> list[Tuned]:
    """Of one optimizer and target, by batch."""
    found = []
    for (batch,), of_batch in sorted(grouped(rows, "batch").items()):
        of_rates = rates(of_batch[0]["optimizer"])
        columns = [
            [math.inf if row["reached"][place] is None else row["reached"][place] for row in of_batch]
            for place in range(len(of_rates))
        ]
        best = min(range(len(columns)), key=lambda place: (statistics.median(columns[place]), max(columns[place])))
        if math.isfinite(statistics.median(columns[best])):
            found.append(Tuned(batch, of_rates[best], best in (0, len(of_rates) - 1), columns[best]))
    return found


def critical_batch(points: Sequence[Tuned]) -> tuple[float, float]:
    """(B_crit, E_min): the least squares of log E over all batches, E = E_min (1 + B / B_crit)."""

    def fit(critical: float) -> tuple[float, float]:
        logs = [math.log(point.examples) - math.log1p(point.batch / critical) for point in points]
        mean = statistics.fmean(logs)
        return sum((value - mean) ** 2 for value in logs), mean

    critical = min((2.0 ** (power / 50) for power in range(1000)), key=lambda value: fit(value)[0])
    return critical, math.exp(fit(critical)[1])


def _cases(rows: Sequence[Row]) -> list[tuple[str, float, list[Row], list[Row]]]:
    """(optimizer, target, rows of the trainings, rows of the measurements), where there are both."""
    cases = []
    for (optimizer, target), of_case in grouped(rows, "optimizer", "target").items():
        kinds = grouped(of_case, "kind")
        if ("train",) in kinds and ("measure",) in kinds:
            cases.append((optimizer, target, kinds["train",], kinds["measure",]))
    return cases


def tables(rows: Sequence[Row], rates: Rates) -> list[str]:
    """What the meter named and what the trainings say; then every batch."""
    named, batches = [], []
    for optimizer, target, trained, measured in _cases(rows):
        points = tuned(trained, rates)
        critical, least = critical_batch(points)
        for (rate,), of_rate in grouped(measured, "rate").items():
            scale = statistics.median(row["scale"] for row in of_rate)
            named.append(
                [
                    f"{optimizer}, to {target:g}",
                    f"{rate:g}",
                    spread([row["scale"] for row in of_rate], 0),
                    f"{min(row['low'] for row in of_rate):.0f}–{max(row['high'] for row in of_rate):.0f}",
                    ", ".join(_quarters(of_rate)),
                    f"{critical:.0f}",
                    f"{scale / critical:.1f}",
                ]
            )
        scale = statistics.median(row["scale"] for row in _at_best_rate(measured))
        for point in points:
            batches.append(
                [
                    f"{optimizer}, to {target:g}",
                    f"{point.batch:,}",
                    f"{point.rate:.3g}{' (edge)' if point.edge else ''}",
                    spread(point.updates, 0),
                    f"{point.examples:,.0f}",
                    f"{point.examples / least:.2f}",
                    f"{1.0 + point.batch / scale:.2f}",
                    f"{1.0 + point.batch / critical:.2f}",
                ]
            )
    return [
        "What the meter named, and the critical batch of the trainings:",
        "",
        *table(
            [
                "optimizer, training loss", "at rate", "noise scale over the whole way", "its 95 % intervals",
                "in each quarter of the way", "B_crit of the trainings", "noise scale / B_crit",
            ],
            named,
        ),
        "Every batch at its best rate; the fewest examples, E_min, are those of the fit:",
        "",
        *table(
            [
                "optimizer, training loss", "batch", "rate", "updates", "examples", "examples / E_min",
                "by the noise scale, 1 + B / B_noise", "by the fit, 1 + B / B_crit",
            ],
            batches,
        ),
    ]  # fmt: skip


def _at_best_rate(measured: Sequence[Row]) -> list[Row]:
    """The highest one that was measured."""
    return [row for row in measured if row["rate"] == max(other["rate"] for other in measured)]


def _quarters(rows: Sequence[Row]) -> list[str]:
    columns = [[row["quarters"][place] for row in rows if row["quarters"][place]] for place in range(4)]
    return [f"{statistics.median(column):.0f}" if column else "lost in the noise" for column in columns]


def draw(figure: Figure, rows: Sequence[Row], rates: Rates) -> None:
    """Examples against batch, a panel for each optimizer and target."""
    cases = _cases(rows)
    columns = len({row["optimizer"] for row in rows})
    grid = figure.subplots(-(-len(cases) // columns), columns, sharey=True, squeeze=False)
    figure.set_figheight(4.0 * len(grid))
    panels = grid.flatten()
    for axis, (optimizer, target, trained, measured) in zip(panels, cases, strict=False):
        points = tuned(trained, rates)
        critical, least = critical_batch(points)
        best = _at_best_rate(measured)
        scale = statistics.median(row["scale"] for row in best)
        batches = [point.batch for point in points]
        middle = [point.examples for point in points]
        low = [point.batch * min(point.updates) for point in points]
        high = [point.batch * max(value for value in point.updates if math.isfinite(value)) for point in points]
        errors = [
            [value - end for value, end in zip(middle, low, strict=True)],
            [end - value for value, end in zip(middle, high, strict=True)],
        ]
        axis.errorbar(
            batches, middle, errors, fmt="o", color="grey", label="at the best rate, median and range of seeds"
        )
        for value, label, style in (
            (scale, f"1 + B / B_noise, B_noise = {scale:.0f} from the meter", "C0-"),
            (critical, f"fitted: 1 + B / B_crit, B_crit = {critical:.0f}", "C1--"),
        ):
            axis.plot(batches, [least * (1.0 + batch / value) for batch in batches], style, label=label)
        axis.axvspan(
            min(row["low"] for row in best),
            max(row["high"] for row in best),
            color="C0",
            alpha=0.2,
            linewidth=0,
            label="noise scale, 95 % intervals",
        )
        axis.set(
            xscale="log", yscale="log", xlabel="batch (samples)", title=f"{optimizer}, training loss {target:g} nats"
        )
        axis.set_xticks(batches[::2], [str(batch) for batch in batches[::2]])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    for first in grid[:, 0]:
        first.set_ylabel("examples to the training loss")
