"""The assumptions of ``ds_vrgd/engines/deepspeed/checkpoints`` about DeepSpeed's checkpoints and loaders."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, build

LOADER = {
    "_load_universal_checkpoint": ["self", "checkpoint_folder", "load_optimizer_states", "load_from_fp32_weights"],
}
FLAT = LOADER | {
    "_load_global_state": ["self", "sd"],
    "_link_all_hp_params": ["self"],
    "update_lp_params": ["self"],
}
#: Methods of the wrappers that are replaced or called by restore.py, and their parameters.
METHODS: dict[type, dict[str, list[str]]] = {
    BF16_Optimizer: FLAT,
    DeepSpeedZeroOptimizer: FLAT,
    DeepSpeedZeroOptimizer_Stage3: LOADER
    | {
        "_load_global_state_stage3": ["self", "sd"],
        "_set_fp32_optimizer_param_groups": ["self"],
        "_clear_fp32_optimizer_param_groups": ["self"],
        "_reassign_or_swap_out_partitioned_parameters": ["args", "kwargs"],  # behind a decorator of DeepSpeed's
    },
}

MODEL = {"module", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"}
MODEL |= {"dp_world_size"}
FLAT_FILE = {"base_optimizer_state", "single_partition_of_fp32_groups", "group_paddings", "param_slice_mappings"}
#: By engine: the names of the optimizer's and the model's file, and what universal.py reads of the former.
FILES: dict[str, tuple[Case, str, str, set[str]]] = {
    "BF16_Optimizer": (
        Case("VRLAMB", 1, "bf16", 2, "fp32"),
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        FLAT_FILE,
    ),
    "DeepSpeedZeroOptimizer": (
        Case("VRLAMB", 2, "fp16", 2),
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        FLAT_FILE | {"zero_stage", "param_alignment_paddings", "dynamic_loss_scale", "loss_scaler"},
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        Case("VRLAMB", 3, "fp16", 2),
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        {"optimizer_state_dict", "fp32_flat_groups", "dynamic_loss_scale", "loss_scaler"},
    ),
}


@pytest.mark.parametrize("wrapper", METHODS, ids=lambda wrapper: wrapper.__name__)
def test_wrapper_loads_as_it_did(wrapper: type) -> None:
    for name, expected in METHODS[wrapper].items():
        method = getattr(wrapper, name, None)
        assert method is not None, (
            f"{wrapper.__name__}.{name} is gone; ds_vrgd/engines/deepspeed/checkpoints/restore.py needs it"
        )
        found = list(inspect.signature(method).parameters)
        assert found == expected, (
            f"{wrapper.__name__}.{name} takes {found} now; see ds_vrgd/engines/deepspeed/checkpoints/restore.py"
        )


def save_all(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (case, *files, _) in FILES.items():
        engine = build(case, 1)
        with tempfile.TemporaryDirectory() as folder:
            engine.save_checkpoint(folder, tag="tag")
            there = {path.name: path for path in Path(folder, "tag").glob("*.pt")}
            contents = [torch.load(there[file], weights_only=False) if file in there else {} for file in files]
        found[name] = {
            "files": set(there),
            "optimizer": set(contents[0].get("optimizer_state_dict", {})),
            "model": set(contents[1]),
            "is_bf16_known_by": "zero_stage" in contents[0].get("optimizer_state_dict", {}),
        }
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_ranks(1, save_all)[0]


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_has_its_files_and_keys(found: dict[str, Any], name: str) -> None:
    _, optimizer_file, model_file, keys = FILES[name]
    assert {optimizer_file, model_file} <= found[name]["files"], (
        "files have other names now; see ds_vrgd/engines/deepspeed/checkpoints/universal.py"
    )
    assert not keys - found[name]["optimizer"], f"{name} saves no {keys - found[name]['optimizer']}; see universal.py"
    assert not MODEL - found[name]["model"], f"no {MODEL - found[name]['model']} in the model's file; see universal.py"


def test_bf16_optimizer_is_the_one_that_saves_no_stage(found: dict[str, Any]) -> None:
    known = {name: of["is_bf16_known_by"] for name, of in found.items() if name != "DeepSpeedZeroOptimizer_Stage3"}
    assert known == {"BF16_Optimizer": False, "DeepSpeedZeroOptimizer": True}, (
        "universal.py tells by it whose weights are saved without their padding"
    )
