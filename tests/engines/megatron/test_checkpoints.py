"""``sharded_state_dict`` and ``state_dict`` with our states: a run that is resumed ends in the same bits.

What ``dist_checkpointing`` would write is handed over in memory: its writer was not run on CPU ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.megatron.cases import Case
from tests.engines.megatron.ranks import on_ranks

pytestmark = pytest.mark.slow

UNSHARDED = {"use_distributed_optimizer": False}
CASES = {
    **{f"{name}, {dtype}": (Case(name, dtype), "dp_reshardable")
       for name in ("VRLAMB", "VRMomentum") for dtype in ("fp32", "bf16")},
    "LAMB": (Case("LAMB", "bf16"), "dp_reshardable"),
    "VRSGD without momentum": (Case("VRSGD"), "dp_reshardable"),
    "fp16 with its loss scale": (Case(dtype="fp16", config={"initial_loss_scale": 64.0}), "dp_reshardable"),
    "unsharded, fp32": (Case(ddp=UNSHARDED), "unsharded"),
    "unsharded, bf16": (Case(dtype="bf16", ddp=UNSHARDED), "unsharded"),
    "unsharded, state_dict": (Case(dtype="bf16", ddp=UNSHARDED), "state_dict"),
    "refused": (Case(), "fully_reshardable"),
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("megatron")
    return on_ranks(2, "lifecycle.resume", CASES, str(folder))


@pytest.mark.parametrize("name", [name for name in CASES if name != "refused"])
def test_a_resumed_run_ends_in_the_same_bits(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        assert of_rank[name] == (True, True, True)


def test_a_layout_without_a_place_for_our_state_is_refused(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "fully_reshardable" in of_rank["refused"]
        assert "dp_reshardable" in of_rank["refused"]
