"""Rates are tried until the best is bracketed, and are compared over the seeds that all of them have."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.evidence.tuning import RATES, best, tune


def rows(values: dict[float, float], seed: int = 0) -> list[dict[str, Any]]:
    return [{"rate": rate, "seed": seed, "loss": value} for rate, value in values.items()]


def worth(row: dict[str, Any]) -> float:
    return -row["loss"] if math.isfinite(row["loss"]) else -math.inf


def called(values: dict[float, float]) -> list[tuple[float, int]]:
    return tune(rows(values), "rate", worth, (1.0, 0.5))


def test_a_rate_at_the_edge_calls_for_the_next_and_one_between_worse_ones_for_seeds() -> None:
    assert called({1.0: 3.0}) == [], "a start has no row"
    assert called({1.0: 3.0, 0.5: 2.0}) == [(0.25, 0)]
    assert called({1.0: 2.0, 0.5: 3.0}) == [(2.0, 0)]
    assert called({1.0: 2.0, 0.5: 3.0, 2.0: 2.5}) == [(1.0, 1), (1.0, 2)]


def test_where_all_came_apart_lower_rates_are_tried_and_not_for_ever() -> None:
    tried = {1.0: math.nan, 0.5: math.nan}
    assert called(tried) == [(0.25, 0)]
    while (following := called(tried))[0][1] == 0:
        tried |= {rate: math.nan for rate, _ in following}
    assert len(tried) == RATES


def test_a_best_among_runs_that_came_apart_is_none() -> None:
    tried = rows({1.0: 2.31, 0.5: 1.7, 0.25: 2.3})
    assert tune(tried, "rate", worth, (1.0, 0.5)) == [(0.5, 1), (0.5, 2)]
    assert tune(tried, "rate", worth, (1.0, 0.5), apart=-1.5) == [(0.125, 0)]
    tried += rows({0.125: 0.5})
    assert tune(tried, "rate", worth, (1.0, 0.5), apart=-1.5) == [(0.0625, 0)]


def test_rates_are_compared_over_the_seeds_that_all_have() -> None:
    few = [*rows({1.0: 2.0, 0.5: 3.0}), *rows({1.0: 9.0}, seed=1), *rows({1.0: 9.0}, seed=2)]
    rate, members = best(few, "rate", worth)
    assert (rate, len(members)) == (1.0, 3), "unlucky seeds of the chosen rate do not make the other one the best"
    all_seeds = [*few, *rows({0.5: 3.0}, seed=1), *rows({0.5: 3.0}, seed=2)]
    assert best(all_seeds, "rate", worth)[0] == 0.5
