"""``dist_checkpointing`` and ``state_dict`` with our states: a run that is resumed ends in the same bits, and one on
other ranks begins with them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.megatron.cases import Case
from tests.engines.megatron.ranks import on_ranks

pytestmark = pytest.mark.slow

WAYS = ("dp_reshardable", "fully_reshardable")
OVERLAP = {"overlap_grad_reduce": True}  # several buckets, with padding between them
UNSHARDED = {"use_distributed_optimizer": False}
#: Groups of one tensor each, which Megatron-Core's own matching of saved groups takes for one.
ALIKE = {"*word_embeddings.weight": {"gamma": 0.3}, "*position_embeddings.weight": {"gamma": 0.05}}
CASES = {
    **{f"{name}, {dtype}": (Case(name, dtype), "dp_reshardable")
       for name in ("VRLAMB", "VRMomentum") for dtype in ("fp32", "bf16")},
    **{f"fully reshardable, {dtype}": (Case(dtype=dtype, ddp=OVERLAP), "fully_reshardable")
       for dtype in ("fp32", "bf16")},
    "LAMB": (Case("LAMB", "bf16"), "dp_reshardable"),
    "VRSGD without momentum": (Case("VRSGD"), "dp_reshardable"),
    "fp16 with its loss scale": (Case(dtype="fp16", config={"initial_loss_scale": 64.0}), "dp_reshardable"),
    "unsharded, fp32": (Case(ddp=UNSHARDED), "unsharded"),
    "unsharded, bf16": (Case(dtype="bf16", ddp=UNSHARDED), "unsharded"),
    "unsharded, state_dict": (Case(dtype="bf16", ddp=UNSHARDED), "state_dict"),
    **{f"unsharded, groups alike, {dtype}, {way}": (Case(dtype=dtype, ddp=UNSHARDED, overrides=ALIKE), way)
       for dtype in ("fp32", "bf16") for way in ("unsharded", "state_dict")},
    "refused": (Case(), "fully_sharded_model_space"),
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
        assert "fully_sharded_model_space" in of_rank["refused"]
        assert "Use 'dp_reshardable' or 'fully_reshardable'" in of_rank["refused"]


def test_other_ranks_begin_with_the_same_bits(tmp_path: Path) -> None:
    """From two data-parallel ranks to four, and to two times two tensor-parallel ones."""
    saved_as = [(Case(dtype=dtype, ddp=OVERLAP), way) for dtype in ("fp32", "bf16") for way in WAYS]
    (saved, _) = on_ranks(2, "lifecycle.save_and_show", saved_as, str(tmp_path))
    loads = [(number, case, way) for number, (case, way) in enumerate(saved_as)]
    loads += [(number, replace(case, tensor=2), way) for number, case, way in loads if way == "fully_reshardable"]
    cases, folders = [load[1:] for load in loads], [str(tmp_path / str(load[0])) for load in loads]
    for of_rank in on_ranks(4, "lifecycle.load_and_show", cases, folders):
        for (number, *_), loaded in zip(loads, of_rank, strict=True):
            expected = saved[number]
            assert expected.keys() == loaded.keys()
            for key, values in expected.items():
                assert any(value.any() for value in values.values()), key
                assert values.keys() == loaded[key].keys()
                for name, value in values.items():
                    assert torch.equal(value, loaded[key][name]), (loads[number], key, name)
