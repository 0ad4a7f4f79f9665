"""Random programs under Megatron-Core, each step against the dense reference (``programs.py``).

What trainings do comes together here as nobody thought of it: configurations, micro-batches that leave out layers or
ranks, gradients that are thrown away, edited, or not finite, rates and gammas that change, runs that are resumed or
rolled back, steps that are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.megatron.ranks import on_ranks

PROGRAMS, MORE_PROGRAMS, ON_FOUR_RANKS = 12, 200, 12


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("programs")
    return on_ranks(2, "programs.run_programs", range(PROGRAMS), str(folder))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_follows_the_reference(failed: dict[int, str], seed: int) -> None:
    assert seed not in failed, failed[seed]


@pytest.mark.nightly
def test_many_programs_follow_the_reference(tmp_path: Path) -> None:
    assert on_ranks(2, "programs.run_programs", range(PROGRAMS, MORE_PROGRAMS), str(tmp_path))[0] == {}


@pytest.mark.nightly
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
def test_programs_of_four_ranks_follow_the_reference(tmp_path: Path, tensor: int, pipeline: int) -> None:
    assert on_ranks(4, "programs.run_programs", range(ON_FOUR_RANKS), str(tmp_path), tensor, pipeline)[0] == {}
