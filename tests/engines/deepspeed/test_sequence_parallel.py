"""Sequence parallelism (Ulysses): a chunk's parts are summed before anything is squared, exactly, at every stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.deepspeed.sequence_cases import REFUSED, WORLD, Seen, SequenceCase, all_others, few, quick, run_cases
from tests.engines.deepspeed.test_exactness import OF_NOISE
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

#: As in docs/EXACTNESS.md; in half precision the norm that DeepSpeed clips by is of its own rounded mean.
BOUND, BOUND_OF_ROUNDED_NORM = 8e-7, 5e-3
#: The distance between the sum of parts and a whole sequence's gradient that rounding alone explains.
ROUNDING = {"fp32": 1e-6, "bf16": 2e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer: dict[str, Any] = run_on_ranks(WORLD, quick, str(tmp_path_factory.mktemp("sequences")))[0]
    return answer


@pytest.fixture(scope="module")
def found_of_others() -> dict[str, Any]:
    return dict(zip(map(SequenceCase.name, all_others()), run_on_ranks(WORLD, run_cases, all_others())[0], strict=True))


def check(case: SequenceCase, seen: Any) -> None:
    assert isinstance(seen, Seen), seen
    rounded_norm = case.clip and case.dtype == "bf16" and (case.stage == 0 or case.reduction == "observe")
    assert seen.of_distance <= BOUND_OF_ROUNDED_NORM
    assert rounded_norm or seen.of_weights <= BOUND
    assert seen.of_chunks <= ROUNDING[case.dtype]
    assert seen.k == (None if case.hyper().get("gamma") == 1.0 else seen.chunks)
    assert (seen.of_noise is None) == (seen.k is None)
    assert seen.of_noise is None or seen.of_noise <= OF_NOISE


@pytest.mark.parametrize("case", few(), ids=SequenceCase.name)
def test_engine_follows_the_reference_of_whole_sequences(found: dict[str, Any], case: SequenceCase) -> None:
    check(case, found[case.name()])


@pytest.mark.parametrize("case", all_others(), ids=SequenceCase.name)
def test_engine_follows_the_reference_at_every_stage(found_of_others: dict[str, Any], case: SequenceCase) -> None:
    check(case, found_of_others[case.name()])


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoint_resumes_bitwise_and_moves_to_another_cut(found: dict[str, Any], stage: int) -> None:
    assert found[f"resumed at stage {stage}"] == {"resumed": [], "cut otherwise": []}


def test_part_that_is_not_finite_spoils_the_window_and_is_named(found: dict[str, Any]) -> None:
    for case, (error, *changed) in found["spoiled"].items():
        assert changed == [], case
        assert "rank 3, micro-batch 2 of the window: NaN" in error


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_with_the_way_out(found: dict[str, Any], name: str) -> None:
    for part in REFUSED[name][2]:
        assert part in found["refused"][name]
