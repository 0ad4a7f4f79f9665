"""Write the predictions of the cost model into docs/SCALING.md: ``python -m benchmarks.model [results]``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cost
from benchmarks.cost import Cost, Link, Machine
from benchmarks.pages import DOCS, replace_between, table
from benchmarks.record import read_runs

#: BERT-large with its pre-training heads.
PARAMETERS = 335_000_000
GPUS = (2, 4, 8, 64, 512)
ACCUMULATIONS = (1, 4)

PER_NODE = 8
BETWEEN = Link(alpha=20e-6, beta=50e9)
ALPHA_INSIDE = 10e-6

#: Measured on two H100 over NVLink before these benchmarks existed: seconds for 335 million gradients in bf16, and for
#: the moments of what a rank receives of them.
KNOWN = {"all-reduce": 2.06e-3, "reduce-scatter": 1.36e-3, "all-to-all": 1.11e-3}
KNOWN_MOMENTS = 0.72e-3

_WHERE = ("inside", "between")


@dataclass(frozen=True)
class Source:
    """The source of a machine's links: words, and measured seconds by (collective, elements, ranks)."""

    words: str
    machine: Machine
    measured: dict[tuple[str, int, int], float]


def known() -> Source:
    """Return the figures from before these benchmarks, with an assumed alpha that they cannot tell."""
    links = {}
    for name, seconds in KNOWN.items():
        call = cost.COLLECTIVES[name](cost.WIRE * PARAMETERS, 2, 2)
        links[name] = Link(ALPHA_INSIDE, call.inside_bytes / (seconds - call.inside_messages * ALPHA_INSIDE))
    moments = cost.one_level(PARAMETERS, 2, 2, 1).memory_bytes
    return Source(
        "not from a run of these benchmarks, but from three figures that were known before: on two H100 over NVLink, "
        "for 335 million bf16 gradients, all-reduce 2.06 ms, reduce-scatter 1.36, all-to-all 1.11, and 0.72 for the "
        f"moments. One size cannot tell alpha, which is assumed: {ALPHA_INSIDE * 1e6:g} µs a message",
        Machine(PER_NODE, links, BETWEEN, moments / KNOWN_MOMENTS),
        {(name, PARAMETERS, 2): seconds for name, seconds in KNOWN.items()},
    )


def measured(run: dict[str, Any]) -> Source:
    """Return the links of a run on one node."""
    rows = run["collectives"]
    environment = run["environment"]
    machine = Machine(PER_NODE, cost.fitted(rows), BETWEEN, cost.merge_speed(rows))
    names = (*cost.COLLECTIVES, "exchange and moments")
    return Source(
        f"fitted to the collectives of {environment['date']} on {environment['ranks']} x {environment['card']} "
        f"([MEASUREMENTS.md](MEASUREMENTS.md))",
        machine,
        {
            (row["name"], row["elements"], row["ranks"]): row["seconds"]["median"]
            for row in rows
            if row["name"] in names
        },
    )


Mode = Callable[[int, int], Cost]


def modes() -> Mapping[str, Mode]:
    """Return lines of the cost by GPUs and accumulation, for BERT-large."""

    def of(function: Callable[..., Cost], ranks: int, accumulation: int) -> Cost:
        return function(PARAMETERS, ranks, PER_NODE, accumulation)

    def observe(stage: int, ranks: int, accumulation: int) -> Cost:
        ours = of(cost.two_levels, ranks, accumulation)
        return of(partial(cost.deepspeed, stage), ranks, accumulation) + ours

    return (
        {f"DeepSpeed, ZeRO-{stage}": partial(of, partial(cost.deepspeed, stage)) for stage in (1, 2, 3)}
        | {f"observe, ZeRO-{stage}": partial(observe, stage) for stage in (1, 2, 3)}
        | {"fused, one level": partial(of, cost.one_level), "fused, two levels": partial(of, cost.two_levels)}
    )


def lines(source: Source) -> list[str]:
    """Return all generated lines of the page."""
    found = [*textwrap.wrap(f"The links inside a node are {source.words}.", 120), ""]
    found += _links(source.machine) + _check(source)
    for accumulation in ACCUMULATIONS:
        found += _predictions(source.machine, accumulation)
    return found + _held()


def _links(machine: Machine) -> list[str]:
    body = [
        [f"{name}, inside", f"{link.alpha * 1e6:.1f}", f"{link.beta / 1e9:.0f}"]
        for name, link in machine.inside.items()
    ]
    body.append(["all, between nodes (assumed)", f"{BETWEEN.alpha * 1e6:.1f}", f"{BETWEEN.beta / 1e9:.0f}"])
    body.append(["moments, in memory", "–", f"{machine.memory / 1e9:.0f}"])
    return table(["link", "alpha, µs", "beta, GB/s"], body)


def _check(source: Source) -> list[str]:
    """Return lines of the model's prediction of the calls that it was fitted to, and of others."""
    body = []
    for (name, elements, ranks), seconds in source.measured.items():
        if name in cost.COLLECTIVES:
            says = cost.COLLECTIVES[name](cost.WIRE * elements, ranks, ranks).seconds(source.machine)
        else:
            says = cost.one_level(elements, ranks, ranks, 1).seconds(source.machine)
        millions = f"{elements / 1e6:.1f}"
        body.append([name, millions, f"{seconds * 1e3:.3f}", f"{says * 1e3:.3f}", f"{says / seconds:.2f}"])
    return table(["check", "million elements", "measured, ms", "model, ms", "model / measured"], body)


def _predictions(machine: Machine, accumulation: int) -> list[str]:
    times, traffic = [], []
    for name, mode in modes().items():
        costs = [mode(gpus, accumulation) for gpus in GPUS]
        times.append([name, *(f"{one.seconds(machine) * 1e3:.2f}" for one in costs)])
        traffic.append([name, *(_traffic(one) for one in costs)])
    batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    columns = [f"{gpus} GPUs" for gpus in GPUS]
    return [
        f"### {batches} a step",
        "",
        "Milliseconds of one step's reduction, nothing overlapping:",
        "",
        *table(["", *columns], times),
        "What a GPU sends in a step: GB inside the node + GB between nodes (messages inside + between):",
        "",
        *table(["", *columns], traffic),
    ]


def _traffic(of: Cost) -> str:
    inside, between = (sum(getattr(call, f"{where}_bytes") for call in of.calls) / 1e9 for where in _WHERE)
    counts = (sum(getattr(call, f"{where}_messages") for call in of.calls) for where in _WHERE)
    return f"{inside:.2f} + {between:.2f} ({' + '.join(f'{count:g}' for count in counts)})"


def _held() -> list[str]:
    body = [
        [name, *(f"{mode(gpus, 1).held_bytes / 1e6:.0f}" for gpus in GPUS)]
        for name, mode in modes().items()
        if name.startswith("fused")
    ]
    return [
        "### Memory",
        "",
        "MB a GPU while a step's gradients are collected, in observe mode too:",
        "",
        *table(["", *(f"{gpus} GPUs" for gpus in GPUS)], body),
    ]


def main(arguments: list[str]) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser("python -m benchmarks.model", description="Write the tables of docs/SCALING.md.")
    parser.add_argument(
        "results",
        type=Path,
        nargs="?",
        help="folder of python -m benchmarks; its last run on at least "
        "two GPUs that measured collectives gives the links",
    )
    parser.add_argument("--page", type=Path, default=DOCS / "SCALING.md")
    chosen = parser.parse_args(arguments)
    source = known()
    if chosen.results is not None:
        runs = [run for run in read_runs(chosen.results) if run["collectives"]]
        if not runs:
            print(f"no run in {chosen.results} has measured collectives", file=sys.stderr)
            return 2
        source = measured(runs[-1])
    replace_between(chosen.page, "predictions", lines(source))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
