"""``ds-vrgd doctor --fsdp``: the table, a fault that it must find, and what it refuses."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import ds_vrgd_cli
from ds_vrgd.doctor.fsdp import examine_fsdp
from ds_vrgd.doctor.report import EXACT, NOT_EXACT
from ds_vrgd.engines.fsdp.exchange import UnitExchange
from tests.support.ranks import run_on_ranks


def spoiled(exchange: Any, parts: int) -> None:
    """Give the second half of each unit's elements too large a variance."""
    _, m2 = exchange._held
    m2[len(m2) // 2 :].mul_(3.0)


def examined(rank: int) -> list[tuple[int, dict[str, str]]]:
    found: list[Any] = [examine_fsdp(name, None, 3) for name in ("VRLAMB", "LARS")]
    with mock.patch.object(UnitExchange, "finish", spoiled):
        found.append(examine_fsdp("VRLAMB", None, 3))
    return [(outcome.status, dict(outcome.rows)) for outcome in found]


@pytest.mark.slow
def test_exact_and_not_exact() -> None:
    for of_rank in run_on_ranks(2, examined):
        (status, rows), (of_lars, _), (spoiled, wrong) = of_rank
        assert (status, of_lars, spoiled) == (EXACT, EXACT, NOT_EXACT)
        assert rows["verdict"] == "exact"
        assert rows["k"] == "4 = 2 ranks x 2 micro-batches"
        assert "is above 8.0e-07" in wrong["NOT EXACT"]


def test_another_optimizer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert ds_vrgd_cli.main(["doctor", "--fsdp", "AdamW"]) == 2
    assert "--fsdp AdamW: not an optimizer of ds_vrgd. Give one of VRSGD" in capsys.readouterr().err
