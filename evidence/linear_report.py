"""What the linear regression's rows say: its tables and its figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import grouped, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Rates for the rms: SGD still on its way after 100 steps, at its best, oscillating.
SHOWN_RATES = (0.178, 0.316, 0.42, 0.56, 1.0)
OSCILLATING = 0.56
SHOWN_SQUARED = (0.27, 0.35, 0.379)  # above 0.387 SGD diverges
SHOWN_K = (2, 8, 32, 64, 128, 256, 512, 2048)
NEVER = "–"
ROUNDING = 1e-9  # below, a test error is fp64's rounding


def tables(rows: Sequence[Row], gammas: Sequence[float], k: int, gamma: float) -> list[str]:
    """Best rates; steps; gamma; k; the order of the weights."""
    cases = grouped(rows, "inputs", "loss", "schedule", "k")
    return [
        *_best(cases, gammas, k, gamma),
        *_steps(cases, gammas, k, gamma),
        *_of_gamma(cases, gammas, k),
        *_of_k(cases, gammas, gamma),
        *_order(cases, k),
    ]


def finals(rows: Sequence[Row], gamma: int, rate: int) -> list[float]:
    """Test errors of all seeds."""
    return [row["final"][gamma][rate] for row in rows]


def best(rows: Sequence[Row], gamma: int) -> int:
    """Place of the rate with the lowest median."""
    return min(range(len(rows[0]["grid"])), key=lambda rate: statistics.median(finals(rows, gamma, rate)))


def nearest(rows: Sequence[Row], rate: float) -> int:
    """Place of the rate nearest to ``rate``."""
    return min(range(len(rows[0]["grid"])), key=lambda place: abs(rows[0]["grid"][place] - rate))


def _best(cases: dict[Any, list[Row]], gammas: Sequence[float], k: int, gamma: float) -> list[str]:
    vr, sgd = gammas.index(gamma), len(gammas) - 1
    body = []
    for (inputs, loss, schedule, chunks), rows in cases.items():
        if chunks not in (8, k):
            continue
        of_sgd, of_vr = best(rows, sgd), best(rows, vr)
        pairs = [(row["final"][vr][of_sgd], row["final"][sgd][of_sgd]) for row in rows]
        exact = min(error for _, error in pairs) < ROUNDING
        body.append(
            [
                f"{inputs}, {loss}, {schedule} rate",
                str(chunks),
                *(
                    cell
                    for which, place in ((sgd, of_sgd), (vr, of_vr))
                    for cell in (f"{rows[0]['grid'][place]:.3g}", _shown(finals(rows, which, place)))
                ),
                NEVER if exact else spread([of_vr / of_sgd for of_vr, of_sgd in pairs], 2),
            ]
        )
    header = ["inputs, loss, schedule", "k", "SGD's best rate", "its test error", "VR-SGD's best rate"]
    header += ["its test error", "VR-SGD / SGD at SGD's best rate"]
    return [f"Each at its own best rate, gamma {gamma:g}; root mean square test error, mean of steps 91 to 100:", "",
            *table(header, body)]  # fmt: skip


def _shown(values: Sequence[float]) -> str:
    return "< 1e-9" if statistics.median(values) < ROUNDING else spread(values)


def _steps(cases: dict[Any, list[Row]], gammas: Sequence[float], k: int, gamma: float) -> list[str]:
    body = []
    for loss, rates in (("rms", SHOWN_RATES), ("squared", SHOWN_SQUARED)):
        rows = cases["uniform", loss, "constant", k]
        for rate in (nearest(rows, rate) for rate in rates):
            ends = [row["curve"][1][rate][-1] for row in rows]
            single = [[_first_at_most(row["curve"][of][rate], end) for row, end in zip(rows, ends, strict=True)]
                      for of in (0, 1)]  # fmt: skip
            of_ten = [[row["reached"][of][rate] for row in rows] for of in (gammas.index(gamma), -1)]
            cells = [loss, f"{rows[0]['grid'][rate]:.3f}"]
            cells += [_shown(finals(rows, of, rate)) for of in (len(gammas) - 1, gammas.index(gamma))]
            body.append([*cells, *(_step(values) for values in single + of_ten)])
    header = ["loss", "rate", "SGD's test error", "VR-SGD's", "steps of VR-SGD to SGD's last error", "of SGD itself"]
    header += ["of VR-SGD, means of 10 steps", "of SGD itself"]
    title = f"Steps to the error at which SGD ends (uniform, constant rate, k = {k}), by single steps, and by means of "
    return [title + "ten, within 1 %; – is never:", "", *table(header, body)]


def _first_at_most(errors: Sequence[float], bound: float) -> int | None:
    return next((step for step, error in enumerate(errors, 1) if error <= bound), None)


def _step(values: Sequence[int | None]) -> str:
    """Median over the seeds, where more than half have one."""
    median = statistics.median(math.inf if value is None else value for value in values)
    return NEVER if median == math.inf else f"{median:g}"


def _of_gamma(cases: dict[Any, list[Row]], gammas: Sequence[float], k: int) -> list[str]:
    body = []
    for chunks in (8, k):
        rows = cases["uniform", "rms", "constant", chunks]
        for rate in (nearest(rows, rate) for rate in SHOWN_RATES[:4]):
            medians = [f"{statistics.median(finals(rows, which, rate)):.3f}" for which in range(len(gammas))]
            body.append([f"{chunks}", f"{rows[0]['grid'][rate]:.3f}", *medians])
    header = ["k", "rate", *(f"γ = {gamma:g}" for gamma in gammas[:-1]), "1, SGD"]
    return ["Test error by gamma (uniform, rms, constant rate; median):", "", *table(header, body)]


def _of_k(cases: dict[Any, list[Row]], gammas: Sequence[float], gamma: float) -> list[str]:
    body = []
    for loss, factor in (("rms", 1.0), ("norm", cases["uniform", "norm", "constant", 8][0]["grid"][0] / 0.1)):
        for which in (gammas.index(gamma), len(gammas) - 1):
            for rate in SHOWN_RATES[2:]:
                of_k = [cases["uniform", loss, "constant", k] for k in SHOWN_K]
                place = nearest(of_k[0], rate * factor)
                medians = [f"{statistics.median(finals(rows, which, place)):.3f}" for rows in of_k]
                name = "SGD" if which == len(gammas) - 1 else "VR-SGD"
                body.append([f"{loss}, {name}", f"{of_k[0][0]['grid'][place]:.3g}", *medians])
    return [f"Test error by k (uniform, constant rate, gamma {gamma:g}; median):", "",
            *table(["loss", "rate", *(f"k = {k}" for k in SHOWN_K)], body)]  # fmt: skip


def _order(cases: dict[Any, list[Row]], k: int) -> list[str]:
    body = []
    for inputs in ("uniform", "centred"):
        rows = cases[inputs, "rms", "constant", k]
        rate = nearest(rows, OSCILLATING)
        for name, which in (("SGD", 1), ("VR-SGD", 0)):
            settled = [_step([row["settled"][which][rate][weight] for row in rows]) for weight in range(10)]
            body.append([f"{inputs}: {name} within 0.5 from step", *settled])
        for tenth in (0, 1, 2, 3, 6, 9):
            ratios = [
                f"{statistics.median(row['ratio'][rate][tenth][weight] for row in rows):.2f}" for weight in range(10)
            ]
            body.append([f"{inputs}: r, steps {10 * tenth + 1} to {10 * tenth + 10}", *ratios])
    return [f"The ten weights, rms, k = {k}, rate {rows[0]['grid'][rate]:.2f} (median):", "",
            *table(["", *(f"w{weight}" for weight in range(1, 11))], body)]  # fmt: skip


def draw(figure: Figure, rows: Sequence[Row], gammas: Sequence[float], k: int, gamma: float) -> None:
    """Curves, gamma, k, and the plane of rate and k."""
    cases = grouped(rows, "inputs", "loss", "schedule", "k")
    vr, sgd = gammas.index(gamma), len(gammas) - 1
    axes = figure.subplots(2, 3).flatten()
    reference = cases["uniform", "rms", "constant", k]
    for rate, color in ((0.178, "C0"), (OSCILLATING, "C1"), (1.0, "C2")):
        place = nearest(reference, rate)
        for which, style in ((1, "--"), (0, "-")):
            axes[0].plot(range(1, 101), reference[0]["curve"][which][place], style, color=color, linewidth=1.2,
                         label=f"{'SGD' if which else 'VR-SGD'}, rate {reference[0]['grid'][place]:.2f}")  # fmt: skip
    axes[0].set(xlabel="step", ylabel="test error", yscale="log", title=f"loss rms, k = {k}, one seed")
    _medians(axes[1], reference, lambda of, rate: statistics.median(finals(of, sgd, rate)), "SGD", "k--")
    for chunks in (8, k, 512):
        of = cases["uniform", "rms", "constant", chunks]
        _medians(axes[1], of, lambda of, rate: statistics.median(finals(of, vr, rate)), f"VR-SGD, k = {chunks}", "-")
    for which, style, name in ((sgd, "k:", "SGD"), (vr, "C3:", "VR-SGD")):
        of = cases["uniform", "rms", "linear", k]
        label = f"{name}, rate falls to 0"
        _medians(axes[1], of, lambda of, rate, w=which: statistics.median(finals(of, w, rate)), label, style)
    axes[1].set(
        xlabel="rate", ylabel="test error", xscale="log", yscale="log", title="loss rms, constant rate or falling"
    )
    for rate in SHOWN_RATES:
        place = nearest(reference, rate)
        values = [statistics.median(finals(reference, which, place)) for which in range(len(gammas))]
        axes[2].plot(gammas, values, ".-", label=f"rate {reference[0]['grid'][place]:.2f}")
    axes[2].axvspan(0.04, 0.2, color="grey", alpha=0.2, label="best in the paper")
    axes[2].set(xlabel="γ (1 is SGD)", ylabel="test error", xscale="log", title=f"loss rms, k = {k}")
    chunks = [key[3] for key in cases if key[:3] == ("uniform", "rms", "constant")]
    for axis, loss in ((axes[3], "rms"), (axes[4], "norm")):
        of_k = [cases["uniform", loss, "constant", each] for each in chunks]
        factor = of_k[0][0]["grid"][0] / 0.1
        for color, rate in enumerate(SHOWN_RATES[1:]):
            place = nearest(of_k[0], rate * factor)
            for which, style in ((vr, "-"), (sgd, "--")):
                values = [statistics.median(finals(of, which, place)) for of in of_k]
                label = f"{'SGD' if which == sgd else 'VR-SGD'}, rate {of_k[0][0]['grid'][place]:.2g}"
                axis.plot(chunks, values, style, color=f"C{color}", label=label)
        axis.axvspan(32, 256, color="grey", alpha=0.2)
        axis.set(xlabel="k (grey: best in the paper)", ylabel="test error", xscale="log", yscale="log")
        axis.set_title(f"loss {loss}, gamma {gamma:g}")
    plane = [
        [
            _log_ratio(cases["uniform", "rms", "constant", each], vr, sgd, rate)
            for rate in range(len(reference[0]["grid"]))
        ]
        for each in chunks
    ]
    image = axes[5].pcolormesh(reference[0]["grid"], chunks, plane, cmap="RdBu_r", vmin=-1, vmax=1, shading="nearest")
    figure.colorbar(image, ax=axes[5], label="log2 of VR-SGD's test error / SGD's")
    axes[5].set(xlabel="rate", ylabel="k", xscale="log", yscale="log", title=f"loss rms, gamma {gamma:g}; blue: VR-SGD")
    for axis in axes[:5]:
        axis.legend(fontsize=6)


def _medians(axis: Any, rows: Sequence[Row], value: Callable[..., float], label: str, style: str) -> None:
    axis.plot(rows[0]["grid"], [value(rows, rate) for rate in range(len(rows[0]["grid"]))], style, label=label)


def _log_ratio(rows: Sequence[Row], vr: int, sgd: int, rate: int) -> float:
    return statistics.median(math.log2(row["final"][vr][rate] / row["final"][sgd][rate]) for row in rows)
