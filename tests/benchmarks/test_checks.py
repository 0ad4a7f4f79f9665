"""The checks that their benchmark switches off, and its interval; the timing itself is not tested."""

from __future__ import annotations

import pytest

from benchmarks.checks import interval, without_checks
from ds_vrgd.engines.deepspeed.chunks import Chunks
from ds_vrgd.engines.deepspeed.edited import EditDetector, FusedEdits


def test_checks_are_off_inside_and_on_again_after() -> None:
    methods = [(Chunks, "came"), (FusedEdits, "come_last"), (FusedEdits, "add_to_sums"), (EditDetector, "find")]
    before = [getattr(owner, name) for owner, name in methods]
    with without_checks():
        assert all(getattr(o, n) is not method for (o, n), method in zip(methods, before, strict=True))
    assert [getattr(owner, name) for owner, name in methods] == before


def test_interval_of_ratios() -> None:
    assert interval([1.5] * 7) == (1.5, 1.5)
    low, high = interval([float(value) for value in range(1, 102)])
    # the median's standard error is about 1.25 * 29.2 / sqrt(101) = 3.6 around 51
    assert low == pytest.approx(51 - 2 * 3.6, abs=4)
    assert high == pytest.approx(51 + 2 * 3.6, abs=4)
