"""How a rate is found: by factors of two, with one seed, until the best has a worse one on either side of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.evidence.experiment import Row
from benchmarks.evidence.report import grouped

SEEDS = (0, 1, 2)
#: More are not tried: where nothing learns at any rate, none is best.
RATES = 8


def tune(
    rows: Sequence[Row],
    field: str,
    value: Callable[[Row], float],
    starts: Sequence[float],
    *,
    apart: float = -math.inf,
) -> list[tuple[float, int]]:
    """The rates, each with a seed, that the rows of one optimizer at one batch call for.

    Args:
        field: of a row, that holds the rate or a factor of it.
        value: of a row, higher where it is better.
        starts: rates that are tried anyway.
        apart: value of a run that came apart, at most. Which of these is the best says nothing: while there are no
            others, lower rates are tried.

    Returns:
        The neighbours of the best rate that were not tried; or where it has worse ones on both sides, that rate with
        the other seeds; or nothing, where a start has no row yet.
    """
    tried = {row[field]: value(row) for row in rows if row["seed"] == SEEDS[0]}
    if not tried.keys() >= set(starts):
        return []
    at_best = max(sorted(tried), key=lambda rate: max(tried[rate], apart))  # the lowest of equals
    neighbours = [rate for rate in (at_best / 2, at_best * 2) if rate not in tried]
    if neighbours and len(tried) < RATES:
        return [(rate, SEEDS[0]) for rate in neighbours]
    return [(at_best, seed) for seed in SEEDS[1:]]


def best(rows: Sequence[Row], field: str, value: Callable[[Row], float]) -> tuple[Any, list[Row]]:
    """What a field is where runs are best, and all its rows.

    By the highest median of ``value`` over the seeds that everything that was tried shares: rates are tried with one
    seed, and the best of them has the others, too.
    """
    groups = grouped(rows, field)
    shared = set.intersection(*({row["seed"] for row in members} for members in groups.values()))

    def median(members: Sequence[Row]) -> float:
        compared = [row for row in members if row["seed"] in shared] or members
        return statistics.median(value(row) for row in compared)

    (chosen,), members = max(groups.items(), key=lambda one: median(one[1]))
    return chosen, members
