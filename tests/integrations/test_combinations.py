"""The pair table: each pair works or gives the error that docs/COMBINATIONS.md has, and none trains wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.combinations import ALL, Pair, judge, run_pairs
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "COMBINATIONS.md"


def check(pairs: list[Pair], folder: Path, write: bool = False) -> None:
    from tests.integrations.combinations_page import read
    from tests.integrations.combinations_page import write as write_page

    verdicts = judge(run_on_ranks(1, run_pairs, pairs, str(folder))[0])
    assert [(pair, verdict) for pair, verdict in verdicts.items() if verdict.startswith("WRONG")] == []
    if write:
        write_page(PAGE, verdicts)
    told = read(PAGE)
    assert set(told) == set(ALL), "a blank cell"
    differing = {pair: (verdict, told[pair]) for pair, verdict in verdicts.items() if verdict != told[pair]}
    assert differing == {}, "write the page anew: --write-combinations"


def test_all_pairs_do_what_the_page_says(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    check(ALL, tmp_path, write=pytestconfig.getoption("--write-combinations"))


def test_offload_with_an_instance_names_the_way_out() -> None:
    from tests.integrations.combinations_page import read

    told = read(PAGE)
    for optimizer in ("instance", "class", "factory"):
        assert '"zero_force_ds_cpu_optimizer": false' in told[Pair(optimizer, "none", "cpu", 2)]
        assert told[Pair(optimizer, "none", "cpu, unforced", 2)] == "works"
    assert "offload_optimizer.device=nvme: after load_checkpoint()" in told[Pair("JSON", "none", "nvme", 3)]
