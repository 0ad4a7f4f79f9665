"""Megatron-Core: the ranks side by side are those of the buffers, and a faulty rank is named."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.megatron.cases import watched
from tests.engines.megatron.ranks import on_ranks

pytestmark = pytest.mark.slow  # importing Megatron-Core takes seconds

RANKS, FAULTY = 4, 2


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return on_ranks(RANKS, "watching.everything")


@pytest.mark.parametrize("name", watched())
def test_a_report_is_that_of_the_buffers(runs: list[dict[str, Any]], name: str) -> None:
    for found in runs:
        assert found[name]["error"] < 1e-6
        assert found[name]["ranks"] == tuple(range(RANKS))
        assert found[name]["layers"] > 10


def test_a_faulty_rank_is_named(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        assert found["fault"] == runs[0]["fault"]
    ((steps, rank, fault, layers),) = runs[0]["fault"]
    assert (steps, rank, fault) == (1, FAULTY, "zero")
    assert layers[0].endswith("linear_fc1.weight")
