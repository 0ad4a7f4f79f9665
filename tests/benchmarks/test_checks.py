"""The checks that their benchmark switches off, and its interval; the timing itself is not tested."""

from __future__ import annotations

import pytest

from benchmarks.checks import WITHOUT, interval, watched
from benchmarks.contenders import CONTENDERS
from ds_vrgd.engines.deepspeed.chunks import Chunks
from ds_vrgd.engines.deepspeed.edited import EditDetector, FusedEdits
from ds_vrgd.moments import Comparison
from ds_vrgd.optim.ranks.recorder import RankRecorder
from ds_vrgd.optim.ranks.watch import RankWatch

CHECKS = [(Chunks, "came"), (FusedEdits, "come_last"), (FusedEdits, "add_to_sums"), (EditDetector, "find")]
WATCH = [(Comparison, "add"), (RankRecorder, "take"), (RankRecorder, "judge")]


@pytest.mark.parametrize(("part", "methods"), [("checks", CHECKS), ("watch", WATCH)])
def test_parts_are_off_inside_and_on_again_after(part: str, methods: list[tuple[type, str]]) -> None:
    before = [getattr(owner, name) for owner, name in methods]
    with WITHOUT[part]():
        assert all(getattr(o, n) is not method for (o, n), method in zip(methods, before, strict=True))
    assert [getattr(owner, name) for owner, name in methods] == before


def test_interval_of_ratios() -> None:
    assert interval([1.5] * 7) == (1.5, 1.5)
    low, high = interval([float(value) for value in range(1, 102)])
    # the median's standard error is about 1.25 * 29.2 / sqrt(101) = 3.6 around 51
    assert low == pytest.approx(51 - 2 * 3.6, abs=4)
    assert high == pytest.approx(51 + 2 * 3.6, abs=4)


def test_a_watched_contender_compares_any_number_of_ranks() -> None:
    before = CONTENDERS["vrlamb-fused"]
    with watched("vrlamb-fused"):
        assert CONTENDERS["vrlamb-fused"].optimizer["params"]["watch"] == "log"  # type: ignore[index]
        assert RankWatch.fewest == 2
    assert CONTENDERS["vrlamb-fused"] is before
    assert RankWatch.fewest == 4
