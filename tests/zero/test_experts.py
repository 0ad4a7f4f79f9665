"""DeepSpeed's MoE: experts have their own ranks and chunks; the whole follows the reference exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.zero.expert_cases import CASES, EXPERT, EXPERTS, WORLD, ExpertCase, run_all

BOUND = 8e-7


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, run_all, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("case", CASES, ids=ExpertCase.name)
def test_shared_layers_and_experts_follow_the_reference(found: list[dict[str, Any]], case: ExpertCase) -> None:
    for rank, of_rank in enumerate(found):
        seen = of_rank[case.name()]
        assert max(seen["errors"]) <= BOUND
        assert seen["of_plain"] <= 1e-6  # the chunks' mean is the gradient of a plain evaluation of all tokens
        assert (seen["k"], seen["mode"]) == (8, "observe")
        own = EXPERTS // case.spread
        first = rank % case.spread * own
        numbers = {name.removeprefix(EXPERT).split(".")[0] for name in seen["layers"] if name.startswith(EXPERT)}
        assert numbers == {str(number) for number in range(first, first + own)}


def test_noise_scale_of_experts_that_no_rank_holds_all_of_is_an_error(found: list[dict[str, Any]]) -> None:
    assert "expert-parallel" in found[0]["noise"]


def test_checkpoint_resumes_bitwise(found: list[dict[str, Any]]) -> None:
    assert found[0]["resumed"] == []


def test_stage_0_is_refused_with_the_way_out(found: list[dict[str, Any]]) -> None:
    assert "MoE layers at zero_optimization.stage=0: not verified. Use stage 1 or 2" in found[0]["stage 0"]
