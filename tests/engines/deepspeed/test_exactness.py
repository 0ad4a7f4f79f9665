"""One trajectory everywhere: each configuration against the dense float64 reference."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.engines.deepspeed.cases import BASE, NEUTRAL, WORLDS, all_cases, identify, is_slow, variants
from tests.engines.deepspeed.conftest import Outcomes
from tests.engines.deepspeed.table import NOT_RUN, ExactnessTable
from tests.support import exactness
from tests.support.trajectory import Case, Result

# Norm-wise after 5 steps in fp32, and for fp32 masters given the same half-precision chunk gradients.
OF_WEIGHTS = 8e-7
# Where DeepSpeed's clipping multiplies in the norm of its own, rounded mean: beside its reduction, not in its place.
OF_DISTANCE = 5e-3
# DeepSpeed's own mean, in half precision: sums of at most six gradients, rounded as often.
OF_MEAN = 2e-2

# Sums of fp32 squares, of the noise and the signal in the gradients of the first step, given the same chunks.
OF_NOISE = 1e-6

FIGURE = re.compile(rf"\s*(\d\.\de-\d\d|-|{NOT_RUN}|)\s*$")

needs_three_ranks = pytest.mark.skipif(3 not in WORLDS, reason="fewer than three GPUs")


def ident(value: object) -> str:
    return f"world{value}" if isinstance(value, int) else str(value) if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("world", "name", "case"),
    [pytest.param(*one, marks=pytest.mark.slow if is_slow(one[2], one[0]) else ()) for one in all_cases()],
    ids=ident,
)
def test_trajectory_follows_the_reference(outcomes: Outcomes, world: int, name: str, case: Case) -> None:
    outcome = outcomes[world, name]
    k = world * case.accumulation
    if k == 1 and case.optimizer.startswith("VR"):
        assert isinstance(outcome, str)
        assert "gradient_accumulation_steps=1 on 1 data-parallel rank makes k = 1 chunk in every step" in outcome
        return
    assert isinstance(outcome, Result), outcome
    assert outcome.moved > 5e-3, "the steps are too small to tell anything"
    if case.clip and case.dtype != "fp32" and not case.is_fused():
        assert outcome.of_distance <= OF_DISTANCE
    else:
        assert outcome.of_weights <= OF_WEIGHTS
    assert outcome.of_mean is None or outcome.of_mean <= OF_MEAN
    if outcome.stats is not None:
        assert outcome.of_noise is not None
        assert outcome.of_noise <= OF_NOISE
        assert outcome.stats.k == k
        assert set(outcome.stats.layers) == {
            "tokens.weight", "positions.weight", "up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight",
            "down.bias", "head.bias",
        }  # fmt: skip


def same_ratio(one: Result | str, other: Result | str) -> None:
    """The raw ratio of each layer and what was clamped, up to the order in which fp32 sums were formed."""
    assert isinstance(one, Result), one
    assert isinstance(other, Result), other
    assert one.stats is not None
    assert other.stats is not None
    assert one.stats.k == other.stats.k
    for name, layer in one.stats.layers.items():
        twin = other.stats.layers[name]
        assert layer.mean_ratio == pytest.approx(twin.mean_ratio, rel=1e-4), name
        assert layer.clamped_low == pytest.approx(twin.clamped_low, abs=1e-3), name
        assert layer.clamped_high == pytest.approx(twin.clamped_high, abs=1e-3), name


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["auto", "observe"])
@pytest.mark.parametrize(("stage", "note"), [(stage, note) for note, stages, _ in NEUTRAL for stage in stages])
def test_ratio_does_not_depend_on_the_setting(outcomes: Outcomes, stage: int, note: str, reduction: str) -> None:
    plain = replace(BASE, stage=stage)
    varied = replace(plain, reduction=reduction)
    same_ratio(outcomes[2, identify(plain)], outcomes[2, identify(varied, note)])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("note", ["reentrant", "non-reentrant", "instance", "factory", "clipped"])
def test_ratio_does_not_depend_on_checkpointing_entry_or_clipping(outcomes: Outcomes, stage: int, note: str) -> None:
    plain = replace(BASE, stage=stage)
    same_ratio(outcomes[2, identify(plain)], outcomes[2, identify(plain, note)])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ratio_does_not_depend_on_the_loss_scale(outcomes: Outcomes, stage: int) -> None:
    plain = replace(BASE, stage=stage, dtype="fp16")
    same_ratio(outcomes[2, identify(plain)], outcomes[2, identify(plain, "scale16x")])


@pytest.mark.slow
@needs_three_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ratio_does_not_depend_on_the_split_of_the_chunks(outcomes: Outcomes, stage: int) -> None:
    splits = [
        outcomes[world, identify(replace(BASE, stage=stage, accumulation=accumulation), "six_chunks")]
        for world, accumulation in ((1, 6), (2, 3), (3, 2))
    ]
    same_ratio(splits[0], splits[1])
    same_ratio(splits[0], splits[2])


@pytest.mark.slow
@needs_three_ranks
def test_ratio_does_not_depend_on_the_stage(outcomes: Outcomes) -> None:
    for stage in (1, 2, 3):
        same_ratio(outcomes[3, identify(replace(BASE, stage=0))], outcomes[3, identify(replace(BASE, stage=stage))])


@needs_three_ranks
@pytest.mark.slow
def test_table_is_complete_and_written_on_request(outcomes: Outcomes, pytestconfig: pytest.Config) -> None:
    table = ExactnessTable(outcomes)
    assert not [line for line in table.matrix() + table.variants() if "FAILED" in line or NOT_RUN in line]
    assert len(table.variants()) == 2 + len(list(variants()))
    if pytestconfig.getoption("--write-exactness"):
        exactness.write(table.page())


@needs_three_ranks
def test_document_lists_every_case() -> None:
    document = exactness.parts()[exactness.DEEPSPEED]
    kept = [what_was_run(line) for line in document.splitlines() if line.startswith("| ")]
    table = ExactnessTable({})
    fresh = [what_was_run(line) for line in table.matrix() + table.variants()]
    assert kept == fresh, "docs/EXACTNESS.md lists other cases: write it anew with --write-exactness"


def what_was_run(row: str) -> list[str]:
    """The cells of a row of the table that are no figures."""
    return [cell for cell in row.split("|") if not FIGURE.match(cell)]
