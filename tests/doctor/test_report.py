"""The verdict and its table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ds_vrgd.doctor.report import Findings, render, rows_of

EXACT = Findings(
    stage=2, dtype="float32", wrapper="DeepSpeedZeroOptimizer", mode="fused",
    why='reduction="auto"', ranks=2, micro_batches=4, clip=1.0, layers=9, reduced=9, trusted=4, steps=3,
    error=5e-8, moved=0.01, worst=("tokens.weight", 4e-8), rounding=1e-4, repeats=True, follows=True,
    state={"exp_avg": 4.0, "exp_avg_gsnr": 2.0},
    moments=(8.0, 0.0), buffers=12345, sent=(6789, 0),
)  # fmt: skip


def row(found: Findings, key: str) -> str:
    return "; ".join(value for name, value in rows_of(found) if name == key)


def test_exact_run_says_so() -> None:
    assert rows_of(EXACT)[-1] == ("verdict", "exact")
    assert row(EXACT, "k") == "8 = 2 ranks x 4 micro-batches"
    assert row(EXACT, "mode") == 'fused: reduction="auto"'
    assert row(EXACT, "error").startswith("5.0e-08 of the weights' norm, at most 8.0e-07; most of it in tokens.weight")
    assert row(EXACT, "optimizer state") == "exp_avg 4.0 + exp_avg_gsnr 2.0 = 6.0 bytes per element of the shard"
    assert row(EXACT, "sent for moments") == "6,789 bytes per rank and micro-batch, in place of DeepSpeed's reduction"
    assert row(EXACT, "chunk gradients") == "bit for bit those of a plain model"
    assert row(replace(EXACT, apart=2e-5), "chunk gradients").startswith("within 2.0e-05 of those of a plain model")
    assert row(EXACT, "warning") == ""


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"error": 8.1e-7}, "the error 8.1e-07 is above 8.0e-07, most of it in tokens.weight"),
        ({"error": math.nan}, "the error nan is above"),
        ({"moved": 9e-4}, "too little to show"),
        ({"moved": math.nan}, "too little to show"),
        ({"follows": False}, "the model's weights are not the optimizer's, rounded"),
        ({"apart": 1.1e-4}, "they are 1.1e-04 apart"),
        ({"apart": math.inf}, "they are inf apart"),
        ({"apart": 1.1e-4, "repeats": False}, "the same gradient twice for the same batch and seed"),
        ({"coarse": "rounded", "error": 5.1e-5}, "the error 5.1e-05 is above 5.0e-05"),
    ],
)
def test_fault_is_named(change: dict[str, Any], fault: str) -> None:
    found = replace(EXACT, **change)
    assert fault in row(found, "NOT EXACT")
    assert row(found, "verdict") == ""


def test_coarse_tolerance_is_of_the_distance_and_says_why() -> None:
    found = replace(EXACT, coarse="the norm is rounded", error=4.9e-5)
    assert found.faults == []
    assert "at most 5.0e-05 (5e-3 of the distance moved: the norm is rounded)" in row(found, "error")


def test_warnings() -> None:
    assert "k = 4" in row(replace(EXACT, micro_batches=2), "warning")
    assert "no layer has GSNR" in row(replace(EXACT, reduced=0), "warning")
    assert "no layer has a trust ratio" in row(replace(EXACT, trusted=0), "warning")
    off = replace(EXACT, mode="off", reduced=None, trusted=None, ranks=1, micro_batches=1)
    assert row(off, "warning") == row(replace(off, mode="fused"), "warning") == ""
    assert row(off, "moments") == ""


def test_raised_rate_is_reported() -> None:
    assert "2, 1 skipped by DeepSpeed; 3 more with a raised learning rate" in row(
        replace(EXACT, steps=5, raised=3, skipped=1), "steps"
    )


def test_table_is_markdown() -> None:
    lines = render([("a", "b|c"), ("longer", "two\nlines")]).splitlines()
    assert lines[1].startswith("| ---")
    assert lines[2:] == ["| a      | b\\|c |", "| longer | two lines |"]
