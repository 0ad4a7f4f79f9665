"""Rates are tried until the best is bracketed and has all seeds."""

from __future__ import annotations

import math
from typing import Any

from evidence.tuning import RATES, best, tune


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


def test_where_seeds_make_another_rate_the_best_it_is_that_ones_turn() -> None:
    lucky = rows({1.0: 2.0, 0.5: 3.0, 0.25: 4.0, 2.0: 7.0})
    assert tune(lucky, "rate", worth, (1.0, 0.5)) == [(1.0, 1), (1.0, 2)]
    assert best(lucky, "rate", worth)[0] == 1.0
    failed = [*lucky, *rows({1.0: 9.0}, seed=1), *rows({1.0: 9.0}, seed=2)]
    assert tune(failed, "rate", worth, (1.0, 0.5)) == [(0.5, 1), (0.5, 2)]
    rate, members = best(failed, "rate", worth)
    assert (rate, len(members)) == (1.0, 3), "one run is not compared with three"
    complete = [*failed, *rows({0.5: 3.5}, seed=1), *rows({0.5: 3.5}, seed=2)]
    assert tune(complete, "rate", worth, (1.0, 0.5)) == [(0.5, 1), (0.5, 2)]
    assert best(complete, "rate", worth)[1] == [row for row in complete if row["rate"] == 0.5]


def test_another_best_at_the_edge_calls_for_the_next_rate() -> None:
    failed = [*rows({1.0: 2.0, 0.5: 3.0, 2.0: 7.0}), *rows({1.0: 9.0}, seed=1), *rows({1.0: 9.0}, seed=2)]
    assert tune(failed, "rate", worth, (1.0, 0.5)) == [(0.25, 0)]


def test_one_seed_brackets_its_best_whatever_the_plan_s_other_seeds_say() -> None:
    planned = [*rows({1.0: 2.0, 0.5: 3.0}), *rows({1.0: 9.0}, seed=1), *rows({1.0: 9.0}, seed=2)]
    assert tune(planned, "rate", worth, (1.0, 0.5)) == [(2.0, 0)]


def test_seeds_may_be_others_and_the_first_of_them_brackets() -> None:
    one = rows({1.0: 3.0, 0.5: 2.0, 0.25: 4.0}, seed=5)
    assert tune(one, "rate", worth, (1.0, 0.5), seeds=(5, 6)) == [(0.5, 6)]
    assert tune(one, "rate", worth, (1.0, 0.5), seeds=(6, 5)) == [], "a start has no row of the first seed"
