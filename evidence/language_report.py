"""The report of the language model: a table for each objective, batch and k, and a figure of one of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.pages import table
from evidence.bert_report import worth
from evidence.experiment import Row
from evidence.report import grouped
from evidence.tuning import best

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The seeds that choose beta1 and rate, and the seeds that are reported.
TUNING, REPORTED = (0, 1), (2, 3, 4, 5, 6)
NO_CONTROL = "none"
#: The values of every run that is not a variant; beta1 where it is not tuned.
BETA1, BETA2, WARMUP = 0.9, 0.999, 0.15
#: The fields of a task, and those of one optimizer or variant in it; beta1, rate and seed remain.
TASK = ("model", "text", "objective", "sequence_length", "examples", "batch", "k", "held_out")
VARIANT = ("optimizer", "control", "beta2", "warmup", "clipping")


@dataclass(frozen=True)
class Arm:
    """One optimizer or variant at its best beta1 and rate.

    Attributes:
        control: of the twin, or ``NO_CONTROL``.
        clipped: whether its gradient is.
        rows: the reported ones by seed.
    """

    optimizer: str
    label: str
    control: str
    clipped: bool
    beta1: float
    rate: float
    rows: dict[int, Row]


def arm_of(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields that all settings of one optimizer or variant of a task share."""
    return tuple(fields[name] for name in (*TASK, *VARIANT))


def best_point(rows: Sequence[Row], betas: Sequence[float]) -> tuple[float, float]:
    """Return the best beta1, of some, and rate, by the seeds for tuning."""
    points = [{**row, "point": (row["beta1"], row["rate"])} for row in rows if row["seed"] in TUNING]
    point: tuple[float, float] = best([row for row in points if row["beta1"] in betas], "point", worth)[0]
    return point


def paired(rows: Mapping[int, Row], others: Mapping[int, Row]) -> list[float]:
    """Return the differences of the final losses, one for each seed that both have."""
    return [row["final"] - others[seed]["final"] for seed, row in rows.items() if seed in others]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, NaN for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), math.nan
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def _label(row: Row) -> str:
    parts = [row["optimizer"]]
    if row["control"] != NO_CONTROL:
        parts.append(row["control"])
    parts += [f"{name} {row[field]:g}" for name, field, usual in
              (("beta2", "beta2", BETA2), ("warm-up", "warmup", WARMUP), ("clipping", "clipping", None))
              if row[field] != usual]  # fmt: skip
    return ", ".join(parts)


def comparisons(rows: Sequence[Row], base: str) -> list[list[Arm]]:
    """Return the arms of a base at one task: at beta1 = 0.9, and where another beta1 is better, at the best one.

    The base comes first and its twin second, then all others by their names, controls last. A variant has the beta1 of
    the optimizer that it is a variant of. Where both are there clipped, a comparison of what is clipped follows,
    which alone has the clipped controls.
    """
    names = (base, f"VR{base}")
    ordered = sorted(rows, key=lambda row: (row["control"] != NO_CONTROL, _label(row)))
    by_arm = grouped([row for row in ordered if row["optimizer"] in names], *VARIANT)
    originals = {name: by_arm.get((name, NO_CONTROL, BETA2, WARMUP, None), []) for name in names}
    found: list[list[Arm]] = []
    for betas in ((BETA1,), tuple(row["beta1"] for row in rows)):
        arms = []
        for of in [*originals.values(), *(of for of in by_arm.values() if of not in originals.values())]:
            original = [row for row in originals[of[0]["optimizer"]] if row["beta1"] in betas] if of else []
            if not any(row["seed"] in TUNING for row in original):
                continue
            beta1 = best_point(original, betas)[0]
            own = [row for row in of if row["beta1"] == beta1]
            if any(row["seed"] in TUNING for row in own):
                rate = best_point(own, (beta1,))[1]
                at_best = {row["seed"]: row for row in own if row["rate"] == rate and row["seed"] in REPORTED}
                one, is_clipped = of[0], of[0]["clipping"] is not None
                arms.append(Arm(one["optimizer"], _label(one), one["control"], is_clipped, beta1, rate, at_best))
        clipped = [arm for arm in arms if arm.clipped]
        for compared in ([arm for arm in arms if arm not in clipped or arm.control == NO_CONTROL], clipped):
            if compared not in found and {arm.optimizer for arm in compared} == set(names):
                found.append(compared)
    return found


def _tasks(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each task, the one with the most rows first."""
    return sorted(grouped(rows, *TASK).values(), key=len, reverse=True)


def _bases(rows: Sequence[Row]) -> list[str]:
    return sorted({row["optimizer"].removeprefix("VR") for row in rows})


def _cells(first: Arm, base: Arm, twin: Arm, arm: Arm) -> list[str]:
    """Return the cells of an arm, compared with its base and twin, and those of a base with the first base."""
    entropy = next(iter(arm.rows.values()))["entropy"]
    loss = statistics.fmean(row["final"] for row in arm.rows.values())
    shown = f"{loss:.3f}" if math.isfinite(loss) else "apart"
    cells = [arm.label, f"{arm.beta1:g}", f"{arm.rate:.3g}", shown + " (plateau)" * (loss >= entropy)]
    of_base = paired(arm.rows, (base if arm is not base else first).rows) if arm is not first else []
    of_twin = paired(arm.rows, twin.rows) if arm not in (base, twin) else []
    ahead = f"{sum(one < 0 for one in of_base)} of {len(of_base)}" if of_base else ""
    return [*cells, _difference(of_base), ahead, _difference(of_twin)]


def _difference(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    if not math.isfinite(mean):
        return "apart"
    return f"{mean:+.3f} ± {error:.3f}" if math.isfinite(error) else f"{mean:+.3f}"


def tables(rows: Sequence[Row]) -> list[str]:
    """A table for each task, and the names of the arms that have no reported seed so far."""
    lines: list[str] = []
    for of_task in _tasks(rows):
        one, body, missing = of_task[0], [], []
        for base in _bases(of_task):
            compared = comparisons(of_task, base)
            for arms in compared:
                missing += [f"{arm.label} (beta1 {arm.beta1:g})" for arm in arms if not arm.rows]
                if arms[0].rows:
                    body += [_cells(compared[0][0], arms[0], arms[1], arm) for arm in arms if arm.rows]
        lines += [
            f"{one['objective'].capitalize()}, {one['model']} model, batch {one['batch']:,}, k = {one['k']}, "
            f"{one['updates']} updates, "
            f"{one['examples']:,} sequences of {one['sequence_length']} tokens; held-out loss in nats a token: means "
            "over the reported seeds, and differences paired by seed with their standard errors. A base with another "
            "beta1 is compared with the first one. Unigram entropy "
            f"{one['entropy']:.3f}: a loss above it (plateau) decides nothing.",
            "",
        ]
        header = ["", "beta1", "rate", "held-out loss", "minus the base", "seeds ahead of the base", "minus the twin"]
        lines += table(header, body) if body else ["No base has a reported seed so far.", ""]
        if missing:
            lines += [f"Without a reported seed so far: {', '.join(dict.fromkeys(missing))}.", ""]
    return lines[:-1]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Paired differences to the base, at the end and along the run, by base: of the task with the most rows."""
    of_task = _tasks(rows)[0]
    one = of_task[0]
    figure.suptitle(f"{one['objective']}, batch {one['batch']:,}, k = {one['k']}, beta1 = {BETA1:g}")
    shown = []
    for base in _bases(of_task):
        arms = next(iter(comparisons(of_task, base)), [])
        if others := [arm for arm in arms[1:] if paired(arm.rows, arms[0].rows)]:
            shown.append((arms[0], others))
    for column, (of_base, others) in enumerate(shown):
        for row, draw_arms in enumerate((_draw_ends, _draw_curves)):
            draw_arms(figure.add_subplot(2, len(shown), row * len(shown) + column + 1), of_base, others)


def _draw_ends(axis: Axes, base: Arm, arms: Sequence[Arm]) -> None:
    for number, arm in enumerate(arms):
        mean, error = mean_and_error(paired(arm.rows, base.rows))
        axis.errorbar(
            mean, number, xerr=0.0 if math.isnan(error) else error, marker="o", capsize=2, color=f"C{number % 6}"
        )
    axis.axvline(0.0, color="grey", linewidth=0.8)
    axis.set_yticks(range(len(arms)), [arm.label for arm in arms])
    axis.invert_yaxis()
    axis.set(xlabel="final loss minus the base's; means, standard errors", title=f"against {base.label}")


def _draw_curves(axis: Axes, base: Arm, arms: Sequence[Arm]) -> None:
    for number, arm in enumerate(arms):
        seeds = [seed for seed in arm.rows if seed in base.rows]
        of_base = {seed: {update: loss for update, loss, *_ in base.rows[seed]["curve"]} for seed in seeds}
        found: dict[int, list[float]] = {}
        for seed in seeds:
            for update, loss, *_ in arm.rows[seed]["curve"]:
                if update in of_base[seed]:
                    found.setdefault(update, []).append(loss - of_base[seed][update])
        means = [statistics.fmean(values) for values in found.values()]
        axis.plot(list(found), means, color=f"C{number % 6}", linestyle="-" if number < 6 else "--", label=arm.label)
    axis.axhline(0.0, color="grey", linewidth=0.8)
    axis.set(xlabel="updates", ylabel="held-out loss minus the base's, nats a token")
    axis.legend(fontsize=6)
