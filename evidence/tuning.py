"""How a rate is found: by factors of two, with one seed, until the best has a worse one on either side of it.

The best is then run with the other seeds, and where these make another one the best, that, too: one seed's luck at a
rate at which others fail must not choose it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from evidence.experiment import Row
from evidence.report import grouped

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
    seeds: Sequence[int] = SEEDS,
) -> list[tuple[float, int]]:
    """The rates, each with a seed, that the rows of one optimizer at one batch call for.

    Args:
        field: of a row, that holds the rate or a factor of it.
        value: of a row, higher where it is better.
        starts: rates that are tried anyway.
        apart: value of a run that came apart, at most. Which of these is the best says nothing: while there are no
            others, lower rates are tried.
        seeds: the first of them finds the bracket.

    Returns:
        The neighbours of the best rate that were not tried; or where it has worse ones on both sides, that rate with
        the other seeds; or nothing, where a start has no row yet. First by one seed, then by the median of the seeds
        that each rate has: where these make another one the best, it is that one's turn.
    """
    tried = {row[field] for row in rows}
    of_one_seed = [row for row in rows if row["seed"] == seeds[0]]
    if not {row[field] for row in of_one_seed} >= set(starts):
        return []
    for compared in (of_one_seed, rows):
        medians = {rate: statistics.median(map(value, of)) for (rate,), of in grouped(compared, field).items()}
        at_best = max(sorted(medians), key=lambda rate: max(medians[rate], apart))  # the lowest of equals
        neighbours = [rate for rate in (at_best / 2, at_best * 2) if rate not in tried]
        if neighbours and len(tried) < RATES:
            return [(rate, seeds[0]) for rate in neighbours]
    return [(at_best, seed) for seed in seeds[1:]]


def best(rows: Sequence[Row], field: str, value: Callable[[Row], float]) -> tuple[Any, list[Row]]:
    """What a field is where runs are best, and all its rows: of those with the most seeds, by the median of ``value``.

    Once nothing is missing that :func:`tune` calls for, none with fewer seeds is better.
    """
    groups = grouped(rows, field).values()
    most = max(map(len, groups))
    members = max((of for of in groups if len(of) == most), key=lambda of: statistics.median(map(value, of)))
    return members[0][field], members
