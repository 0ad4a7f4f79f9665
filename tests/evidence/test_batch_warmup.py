"""A policy raises the batch when it should, a run uses each example once, and the report compares what was tuned."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from ds_vrgd.noise import NoiseScale, NoiseScaleMeter
from evidence import batch_warmup
from evidence.batch_warmup import RATES, Setting, batch_by_hand, batch_of_meter, follow_up, settings, train
from evidence.batch_warmup_report import (
    BY_HAND,
    FIXED,
    METER,
    REPORTED,
    TUNING,
    Crossing,
    Policy,
    against_fixed,
    crossing,
    draw,
    examples_of_fixed,
    policies,
    policy_of,
    tables,
    targets,
    verdict,
    worth,
)
from evidence.experiment import Row
from evidence.language_model import Text
from evidence.meter import ALMOST_1
from tests.evidence.counting import LENGTH

TINY = Setting(
    "toy", "speeches", LENGTH, 256, 99, 0.0, "AdamW", METER, 16, 64, 16, 1e-2, 0, warmup=64, interval=64, held_out=16,
    decay=0.9, every=4,
)  # fmt: skip


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (NoiseScale(120.0, 100.0, 150.0), 128),
        (NoiseScale(95.0, 90.0, 99.0), 128),  # log2 is 6.57
        (NoiseScale(85.0, 80.0, 90.0), 64),  # log2 is 6.41
        (NoiseScale(900.0, 800.0, 1000.0), 128),  # at most twice the batch
        (NoiseScale(5.0, 4.0, 6.0), 64),  # never less
        (NoiseScale(0.4, 0.3, 0.5), 64),
        (NoiseScale(120.0, 80.0, 160.0), 128),  # just narrow enough
        (NoiseScale(120.0, 79.0, 160.0), 64),
        (NoiseScale(120.0, 0.0, 160.0), 64),
        (NoiseScale(120.0, 100.0, math.inf), 64),
        (NoiseScale(math.inf, 0.0, math.inf), 64),
    ],
)
def test_the_meter_doubles_the_batch_when_it_is_sure(found: NoiseScale, wanted: int) -> None:
    assert batch_of_meter(64, found, largest=1024, widest=2.0) == wanted


def test_the_meter_stops_at_the_largest_batch() -> None:
    assert batch_of_meter(64, NoiseScale(900.0, 800.0, 1000.0), largest=64, widest=2.0) == 64


def test_the_schedule_doubles_at_its_examples() -> None:
    assert [batch_by_hand(32, seen, (64, 128)) for seen in (0, 63, 64, 127, 128, 500)] == [32, 32, 64, 64, 128, 128]


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Watched:
    """A record of what a run did."""

    spans: list[tuple[int, int]]  # first example and batch of each update
    curve: list[int]  # examples at each evaluation
    batches: list[list[int]]


def watched(monkeypatch: pytest.MonkeyPatch, setting: Setting, text: Text, found: NoiseScale | None = None) -> Watched:
    """Train, where the meter says ``found``."""
    spans: list[tuple[int, int]] = []
    accumulate = batch_warmup.accumulate

    def recorded(model: Any, examples: Any, first: int, batch: int, k: int) -> None:
        spans.append((first, batch))
        accumulate(model, examples, first, batch, k)

    monkeypatch.setattr(batch_warmup, "accumulate", recorded)
    if found is not None:
        monkeypatch.setattr(batch_warmup.ds_vrgd.NoiseScaleMeter, "estimate", lambda self: found)
    row = train(setting, text)
    return Watched(spans, [one[0] for one in row["curve"]], row["batches"])


@pytest.mark.parametrize("policy", [FIXED, BY_HAND, METER])
def test_a_run_uses_each_example_once_and_is_evaluated_after_the_same_ones(
    monkeypatch: pytest.MonkeyPatch, text: Text, policy: str
) -> None:
    """96 is no multiple of 64: the second doubling waits until 128."""
    setting = dataclasses.replace(TINY, policy=policy, doubled_at=(32, 96))
    found = watched(monkeypatch, setting, text, NoiseScale(500.0, 450.0, 550.0))
    assert [first for first, _ in found.spans] == [0, *(first + batch for first, batch in found.spans[:-1])]
    assert sum(found.spans[-1]) == 256
    assert found.curve == list(range(0, 257, 64))
    changes = {
        FIXED: [[0, 16]],
        BY_HAND: [[0, 16], [32, 32], [128, 64]],
        METER: [[0, 16], [64, 32], [192, 64]],  # after 4 updates, and after 8
    }
    assert found.batches == changes[policy]
    assert [first for first, batch in found.spans if batch == 64][:1] == [
        first for first, batch in changes[policy] if batch == 64
    ]


def test_the_meter_waits_for_a_narrow_interval(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    assert watched(monkeypatch, TINY, text, NoiseScale(500.0, 100.0, 900.0)).batches == [[0, 16]]


def test_the_rate_follows_the_root_of_the_batch_after_its_warm_up(monkeypatch: pytest.MonkeyPatch, text: Text) -> None:
    rates: list[float] = []

    def stepped(self: torch.optim.Optimizer, *arguments: Any, **options: Any) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self, *arguments, **options)

    step = batch_warmup.ds_vrgd.VRAdamW.step
    monkeypatch.setattr(batch_warmup.ds_vrgd.VRAdamW, "step", stepped)
    train(dataclasses.replace(TINY, policy=BY_HAND, doubled_at=(128,)), text)
    ramp = [0.25e-2, 0.5e-2, 0.75e-2]
    assert rates == pytest.approx([*ramp, *[1e-2] * 5, *[math.sqrt(2.0) * 1e-2] * 4])


def test_a_run_learns_repeats_bit_for_bit_and_ends_at_its_target(text: Text) -> None:
    row = train(TINY, text)
    assert train(TINY, text) == row
    assert train(dataclasses.replace(TINY, seed=1), text)["final"] != row["final"]
    losses = [one[3] for one in row["curve"]]
    assert losses[-1] == row["final"] < losses[0] - 0.5
    ended = train(dataclasses.replace(TINY, target=losses[2]), text)
    assert ended["curve"] == row["curve"][:3]
    scales = [one[4] for one in row["curve"]]
    assert scales[0] is None
    assert all(one[5] <= one[4] <= one[6] for one in row["curve"][1:])


def test_a_meter_continues_at_another_batch(text: Text) -> None:
    """The noise scale is of single examples, so that the estimates of two batches may be averaged."""
    setting = dataclasses.replace(TINY, decay=1.0)
    model = batch_warmup.make_model("toy", text, "causal", 0, [])
    optimizer = batch_warmup.make_optimizer("VRAdamW", model, 0.0, 0.9, gamma=ALMOST_1)
    examples = text.train[:, :-1], text.train[:, 1:]

    def estimate(meter: NoiseScaleMeter, batch: int) -> float:
        """Measure the first 256 examples at rate 0."""
        for first in range(0, 256, batch):
            batch_warmup.accumulate(model, examples, first, batch, 8)
            optimizer.step()
            optimizer.zero_grad()
            meter.update(optimizer)
        return meter.estimate().value

    before = batch_warmup._meter(setting, 16)
    of_16, of_64 = estimate(before, 16), estimate(batch_warmup._meter(setting, 64), 64)
    assert of_64 == pytest.approx(of_16, rel=0.3)
    after = batch_warmup._meter(setting, 64, before)
    assert after.estimate() == before.estimate()
    assert min(of_16, of_64) < estimate(after, 64) < max(of_16, of_64)


def test_a_run_with_too_many_updates_is_given_up(text: Text) -> None:
    row = train(dataclasses.replace(TINY, policy=FIXED, most_updates=6), text)
    assert (row["updates"], [one[0] for one in row["curve"]]) == (6, [0, 64])


# -- the report -------------------------------------------------------------------------------------------------------


def a_row(setting: Setting, curve: list[tuple[int, int, int, float]], noise: float = 40.0) -> Row:
    of_curve = [[*one, noise, noise / 1.2, noise * 1.2] if one[0] else [*one, None, None, None] for one in curve]
    batches = [[0, setting.batch]]
    return {
        **dataclasses.asdict(setting), "curve": of_curve, "batches": batches, "final": curve[-1][3], "entropy": 6.8,
        "updates": curve[-1][1],
    }  # fmt: skip


def test_a_crossing_is_on_a_straight_line_between_evaluations() -> None:
    row = a_row(TINY, [(0, 0, 16, 9.0), (100, 10, 16, 7.0), (300, 18, 32, 6.0), (400, 20, 32, 5.0)])
    assert crossing(row, 8.0) == Crossing(50.0, 5.0, 16, 40.0)
    assert crossing(row, 6.25) == Crossing(250.0, 16.0, 32, 40.0)
    assert crossing(row, 6.0) == Crossing(300.0, 18.0, 32, 40.0)
    assert crossing(row, 4.9) == Crossing(math.inf, math.inf)
    assert crossing(row, 9.5).examples == 0.0
    apart = a_row(TINY, [(0, 0, 16, 9.0), (100, 10, 16, 7.0), (200, 20, 16, math.nan)])
    assert crossing(apart, 6.0) == Crossing(math.inf, math.inf)


def test_the_first_crossing_counts() -> None:
    row = a_row(TINY, [(0, 0, 16, 9.0), (100, 10, 16, 6.0), (200, 20, 16, 8.0), (300, 30, 16, 6.0)])
    assert crossing(row, 7.0).examples == pytest.approx(100 * 2 / 3)


def test_a_run_is_worth_more_the_sooner_it_reaches_the_target_or_the_nearer_it_ends() -> None:
    one = dataclasses.replace(TINY, examples=512, target=6.0)
    ends = [
        a_row(one, [(0, 0, 16, 9.0), (200, 20, 16, 5.0)]),
        a_row(one, [(0, 0, 16, 9.0), (512, 20, 16, 5.9)]),
        a_row(one, [(0, 0, 16, 9.0), (512, 20, 16, 6.01)]),
        a_row(one, [(0, 0, 16, 9.0), (512, 20, 16, 7.0)]),
        a_row(one, [(0, 0, 16, 9.0), (100, 20, 16, math.nan)]),
    ]
    worths = [worth(row) for row in ends]
    assert worths == sorted(worths, reverse=True)
    assert len(set(worths)) == 5


def run_of(setting: Setting, examples: float, updates: float, noise: float = 40.0) -> Row:
    """A run whose loss falls on straight lines to the target, at ``examples`` and ``updates``."""
    return a_row(
        setting, [(0, 0, setting.batch, setting.target + 1.0), (int(examples), int(updates), 64, setting.target)], noise
    )


#: Of the constructed rows: a best rate, and the examples there.
BEST = {FIXED: 2.0 * RATES[1], METER: RATES[1] * math.sqrt(2.0), BY_HAND: 16.0 * RATES[1]}


def completed() -> list[Row]:
    """The rows of the whole full size; fixed batches need E = 10,000 (1 + B / 128) examples at the best rate."""
    rows: list[Row] = []
    while True:
        done = {(policy_of(row), row["rate"], row["seed"]) for row in rows}
        wanted = dict.fromkeys([*follow_up("full", rows), *settings("full")])
        missing = [one for one in wanted if (policy_of(vars(one)), one.rate, one.seed) not in done]
        if not missing:
            return rows
        for one in missing:
            away = abs(math.log2(one.rate / BEST[one.policy]))
            batch = one.batch if one.policy == FIXED else 128
            least = 20_000.0 if one.policy == METER else 10_000.0 * (1.0 + batch / 128)
            if one.policy == BY_HAND:
                least *= 1.5
            examples = least * (1.0 + 0.1 * away + 0.01 * one.seed)
            rows.append(run_of(one, examples, examples / batch))


@pytest.fixture(scope="module")
def full() -> list[Row]:
    return completed()


def test_every_policy_has_the_same_grid_until_its_best_is_bracketed(full: list[Row]) -> None:
    plan = settings("full")
    starts = {policy_of(vars(one)): {other.rate for other in plan if policy_of(vars(other)) == policy_of(vars(one))}
              for one in plan}  # fmt: skip
    assert len(starts) == len(batch_warmup.BATCHES) + 2 + 3, "128, 256 and 512 have two warm-ups"
    assert {one.warmup for one in plan if one.batch > 64} == {8192, 128 * 128, 128 * 256, 128 * 512}
    assert all(rates == set(RATES) for rates in starts.values())
    for policy in starts:
        of = [row for row in full if policy_of(row) == policy]
        tried = {row["rate"] for row in of if row["seed"] == TUNING}
        steps = sorted(round(2.0 * math.log2(rate / RATES[0])) for rate in tried)
        assert [math.sqrt(2.0) ** step * RATES[0] for step in steps] == pytest.approx(sorted(tried))
        (best,) = {row["rate"] for row in of if row["seed"] in REPORTED}
        assert best == pytest.approx(BEST[of[0]["policy"]])
        at = steps.index(round(2.0 * math.log2(best / RATES[0])))
        assert steps[at - 1 : at + 2] == [steps[at] - 1, steps[at], steps[at] + 1], "half a step on either side"
        assert {row["seed"] for row in of if row["rate"] == best} == {TUNING, *REPORTED}
    assert TUNING not in REPORTED


def test_the_small_size_compares_the_same_policies_without_follow_up() -> None:
    plan = settings("small")
    assert {one.policy for one in plan} == {FIXED, BY_HAND, METER}
    assert {one.seed for one in plan} > {TUNING}
    assert follow_up("small", []) == []


def test_policies_are_evaluated_after_the_same_examples_or_refused() -> None:
    with pytest.raises(ValueError, match="examples=256, interval=48, largest=64: each must be a multiple"):
        dataclasses.replace(TINY, interval=48)


def test_the_examples_of_fixed_batches_are_between_two_of_them() -> None:
    # the third is slower than one that needs fewer examples, and the last never arrives
    fixed = [Crossing(10_000, 400), Crossing(40_000, 100), Crossing(90_000, 250), Crossing(math.inf, math.inf)]
    assert examples_of_fixed(fixed, 200) == pytest.approx(20_000)
    assert examples_of_fixed(fixed, 400) == pytest.approx(10_000)
    assert examples_of_fixed(fixed, 99) is None
    assert examples_of_fixed(fixed, 401) is None


def at(kind: str, batch: int, examples: list[float], updates: list[float]) -> Policy:
    one = dataclasses.replace(TINY, policy=kind, batch=batch, target=6.0, examples=2**20)
    of_seeds = zip(REPORTED, examples, updates, strict=True)
    return Policy(kind, batch, 512, 1e-3, False, {seed: run_of(one, *of) for seed, *of in of_seeds})


def test_the_verdict_is_that_of_the_rows() -> None:
    fixed = [at(FIXED, 25, [10_000] * 3, [400] * 3), at(FIXED, 400, [40_000] * 3, [100] * 3)]
    ahead = at(METER, 32, [10_000, 10_400, 10_200], [200] * 3)
    text = " ".join(verdict([*fixed, ahead], 6.0))
    assert "Fewest examples: fixed, 25 (10,000)." in text
    assert "2 of 3 policies need at most 5% more; the fewest updates of these: by the meter (200)." in text
    assert "2 of 3 policies need at most 25% more" in text
    assert against_fixed(ahead, fixed, 6.0) == pytest.approx([0.5, 0.52, 0.51])
    assert "By the meter: 0.51 (0.50–0.52) times the examples" in text
    assert "fewer with every seed" in text
    mixed = at(METER, 32, [19_000, 21_000, 20_000], [200] * 3)
    assert "neither fewer nor more with every seed" in " ".join(verdict([*fixed, mixed], 6.0))
    behind = at(BY_HAND, 32, [30_000, 21_000, 22_000], [200] * 3)
    assert "updates, more with every seed" in " ".join(verdict([*fixed, behind], 6.0))
    outside = at(METER, 32, [10_000] * 3, [500] * 3)
    assert "By the meter: outside of what the fixed batches span." in verdict([*fixed, outside], 6.0)
    assert verdict([*fixed, ahead], 5.9) == ["No policy reaches this loss with every seed."]


def test_who_never_reaches_a_target_with_a_seed_is_not_compared_and_is_told() -> None:
    one = dataclasses.replace(TINY, policy=FIXED, batch=64, target=6.0)
    lost = a_row(one, [(0, 0, 64, 9.0), (512, 8, 64, 6.1)])
    partly = at(FIXED, 64, [5_000] * 3, [78] * 3)
    partly.rows[REPORTED[0]] = lost
    other = at(FIXED, 32, [10_000] * 3, [300] * 3)
    assert "Fewest examples: fixed, 32 (10,000)" in verdict([other, partly], 6.0)[0]
    rows = [*partly.rows.values(), run_of(one, 5_000, 78)]
    rows = [{**row, "rate": 1e-3, "seed": seed} for row, seed in zip(rows, (*REPORTED, TUNING), strict=True)]
    assert "5,000 (5,000–5,000); 1 of 3 never" in "\n".join(tables(rows))


def test_tables_and_figure_of_the_full_size(full: list[Row]) -> None:
    from matplotlib.figure import Figure

    found = policies(full)
    assert [one.label for one in found[:2]] == ["fixed, 32", "fixed, 64"]
    assert [one.label for one in found[-2:]] == ["by hand", "by the meter"]
    assert not any(one.edge for one in found)
    lines = "\n".join(tables(full))
    assert lines.count("To a held-out loss of") == len(targets(full)) == 3
    assert "| by the meter | 0.00141 | 8,192 | 20,400 (20,200–20,600) |" in lines
    assert "| 1 | 32 from 0 |" in lines
    figure = Figure(figsize=(14, 4))
    draw(figure, full)
    assert [len(axis.get_lines()) > 3 for axis in figure.axes] == [True] * 4


def test_a_report_without_reported_seeds_names_the_policies() -> None:
    from matplotlib.figure import Figure

    rows = [run_of(one, 10_000, 300) for one in settings("full")[:3]]
    assert "Without a reported seed so far: fixed, 32." in tables(rows)
    draw(Figure(), rows)
