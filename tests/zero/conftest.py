"""All engine configurations, run once a session: one spawn for each number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Result, run_cases
from tests.zero.cases import all_cases, is_slow
from tests.zero.table import ExactnessTable

Outcomes = dict[tuple[int, str], Result | str]


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Outcomes:
    """Result, or the error's text, by (world, id); of the slow ones only where a slow test asks."""
    asks = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    every = any(item.get_closest_marker("slow") for item in asks)
    cases = [(world, name, case) for world, name, case in all_cases() if every or not is_slow(case, world)]
    found: Outcomes = {}
    for world in sorted({ranks for ranks, _, _ in cases}):
        mine = [(name, case) for ranks, name, case in cases if ranks == world]
        results: list[Any] = run_on_ranks(world, run_cases, world, [case for _, case in mine])[0]
        found |= {(world, name): result for (name, _), result in zip(mine, results, strict=True)}
    pytestconfig.stash[ExactnessTable.key] = ExactnessTable(found)
    return found
