"""``ds-vrgd doctor --megatron``: the table, a fault that it must find, and what it refuses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import ds_vrgd_cli
from tests.engines.megatron.ranks import on_ranks
from tests.support.ranks import DEVICE


def examined(rank: int) -> list[tuple[int, dict[str, str]]]:
    from ds_vrgd.doctor.megatron import examine_megatron
    from ds_vrgd.engines.megatron.exchange import BucketExchange

    right = BucketExchange.moments

    def spoiled(exchange: Any, bucket: Any, run: slice) -> Any:
        """Give every second shard too large a variance."""
        moments = right(exchange, bucket, run)
        moments.m2[len(moments.m2) // 2 :].mul_(3.0)
        return moments

    found: list[Any] = [examine_megatron(name, None, 3) for name in ("VRLAMB", "LARS")]
    with mock.patch.object(BucketExchange, "moments", spoiled):
        found.append(examine_megatron("VRLAMB", None, 3))
    return [(outcome.status, dict(outcome.rows)) for outcome in found]


@pytest.mark.slow
def test_exact_and_not_exact() -> None:
    from ds_vrgd.doctor.report import EXACT, NOT_EXACT

    for of_rank in on_ranks(2, "test_doctor.examined"):
        (status, rows), (of_lars, _), (spoiled, wrong) = of_rank
        assert (status, of_lars, spoiled) == (EXACT, EXACT, NOT_EXACT), of_rank
        assert rows["verdict"] == "exact"
        assert rows["k"] == "2 ranks, each with the sum of its 2 micro-batches"
        assert "is above 8.0e-07" in wrong["NOT EXACT"]


@pytest.mark.skipif(DEVICE != "cpu", reason="there it runs")
def test_it_needs_a_gpu_and_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_vrgd_cli.main(["doctor", "--megatron"]) == 2
    assert "there is no GPU here" in capsys.readouterr().err
    assert ds_vrgd_cli.main(["doctor", "--megatron", "AdamW"]) == 2
    assert "--megatron AdamW: not an optimizer of ds_vrgd. Give one of VRSGD" in capsys.readouterr().err
