"""Rates at steps worked out by hand, and the LAMB table that the scaling rules reproduce."""

from __future__ import annotations

import math

import pytest

from ds_vrgd.schedules import (
    legw_warmup_ratio,
    phase_of_step,
    square_root_scaled_lr,
    warmup_cosine_lr,
    warmup_polynomial_lr,
)

# You et al. 2019, table 1 (SQuAD/BERT): lr = 5 / (2^i * 1e3) with i = 3.0, 2.5, ... 0.0, warm-up 1/320 ... 1/5
LAMB_BATCHES = [512, 1024, 2048, 4096, 8192, 16384, 32768]


@pytest.mark.parametrize("index, batch", list(enumerate(LAMB_BATCHES)))
def test_scaling_rules_reproduce_the_lamb_table(index: int, batch: int) -> None:
    assert square_root_scaled_lr(5e-3, 32768, batch) == pytest.approx(5e-3 / 2 ** (3.0 - 0.5 * index))
    assert legw_warmup_ratio(1 / 320, 512, batch) == pytest.approx(1 / (320 / 2**index))


def test_legw_refuses_a_warmup_longer_than_the_run() -> None:
    with pytest.raises(ValueError, match=r"base_ratio=0\.2 at batch 32768 .* batch 262144"):
        legw_warmup_ratio(0.2, 32768, 262144)


@pytest.mark.parametrize(
    "step, expected",
    [
        (0, 1.0),  # first of four warm-up updates: 4 * 1/4
        (2, 3.0),
        (3, 4.0),  # the last warm-up update is at the peak
        (4, 4.0),  # decay starts at the peak: 4 * (1 - 0/6)
        (7, 2.0),  # half of the six decaying updates are over: 4 * (1 - 3/6)
        (9, 4.0 / 6),  # the last update still moves: 4 * (1 - 5/6)
    ],
)
def test_linear_warmup_then_linear_decay(step: int, expected: float) -> None:
    assert warmup_polynomial_lr(step, total_steps=10, peak_lr=4.0, warmup_steps=4) == pytest.approx(expected)


def test_decay_power_shapes_only_the_decay() -> None:
    rates = [warmup_polynomial_lr(s, total_steps=8, peak_lr=2.0, warmup_steps=4, power=0.5) for s in range(8)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[4:] == pytest.approx([2.0 * math.sqrt(1 - i / 4) for i in range(4)])


def test_no_warmup_and_all_warmup() -> None:
    assert warmup_polynomial_lr(0, total_steps=3, peak_lr=3.0) == 3.0
    assert [warmup_polynomial_lr(s, total_steps=2, peak_lr=2.0, warmup_steps=2) for s in (0, 1)] == [1.0, 2.0]


@pytest.mark.parametrize("arguments", [{"step": 10}, {"step": -1}, {"warmup_steps": 11}, {"total_steps": 0}])
def test_out_of_range_arguments_are_named(arguments: dict[str, int]) -> None:
    (name,) = arguments
    call: dict[str, int] = {"step": 0, "total_steps": 10, "warmup_steps": 0, **arguments}
    with pytest.raises(ValueError, match=f"{name}={arguments[name]}"):
        warmup_polynomial_lr(call.pop("step"), peak_lr=1.0, **call)


def test_phase_steps_restart_and_the_end_is_a_phase_of_its_own() -> None:
    assert [phase_of_step(s, [3, 2]) for s in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    with pytest.raises(ValueError, match="step=6"):
        phase_of_step(6, [3, 2])


def test_cosine_starts_at_the_peak_and_ends_beside_zero() -> None:
    rates = [warmup_cosine_lr(s, total_steps=6, peak_lr=2.0, warmup_steps=2) for s in range(6)]
    # 1 + cos(pi * s / 4), s = 0 ... 3
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5])
    with pytest.raises(ValueError, match=r"step=6 must lie in \[0, total_steps=6\)"):
        warmup_cosine_lr(6, total_steps=6, peak_lr=2.0)
