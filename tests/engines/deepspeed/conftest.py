"""All engine configurations, run once a session, many in a spawn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines.deepspeed.cases import all_cases, is_slow
from tests.engines.deepspeed.table import ExactnessTable
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import Case, Result, run_cases

Outcomes = dict[tuple[int, str], Result | str]

# Of a spawn, at most; and spawns that run at once. A rank that computes the reference leaves the others waiting.
CASES = 64
AT_ONCE = 2 if DEVICE == "cpu" else 1


def spawns(cases: list[tuple[int, str, Case]]) -> Iterator[list[tuple[int, str, Case]]]:
    """Parts of the cases that have one number of ranks each; the most ranks first.

    Stage 3 comes last: it replaces ``torch.nn.functional.linear`` in its process, which rounds fp16 in another way.
    """
    for world in sorted({ranks for ranks, _, _ in cases}, reverse=True):
        mine = sorted((case for case in cases if case[0] == world), key=lambda case: case[2].stage == 3)
        yield from (mine[start : start + CASES] for start in range(0, len(mine), CASES))


def run(part: list[tuple[int, str, Case]]) -> Outcomes:
    world = part[0][0]
    results: list[Any] = run_on_ranks(world, run_cases, world, [case for _, _, case in part])[0]
    return {(world, name): result for (_, name, _), result in zip(part, results, strict=True)}


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Outcomes:
    """Result, or the error's text, by (world, id); of the slow ones only where a slow test asks."""
    asks = [item for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    every = any(item.get_closest_marker("slow") for item in asks)
    cases = [(world, name, case) for world, name, case in all_cases() if every or not is_slow(case, world)]
    found: Outcomes = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for outcomes_of_part in pool.map(run, spawns(cases)):
            found |= outcomes_of_part
    pytestconfig.stash[ExactnessTable.key] = ExactnessTable(found)
    return found
