"""Everything of DeepSpeed's that is not documented and that ``ds_vrgd/zero`` leans on.

When one of these fails, DeepSpeed has changed: read its new code, mend the room that is named, and only then widen
the tested range in ``ds_vrgd/zero/versions.py``.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from ds_vrgd.zero.groups import is_split
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, build

#: Methods of the engine that are wrapped or called, their parameters, and the room that does it.
METHODS = {
    "optimizer_name": (["self"], "register"),
    "_is_supported_optimizer": (["self", "optimizer_name"], "register"),
    "_configure_distributed_model": (["self", "model"], "register"),
    "_configure_basic_optimizer": (["self", "model_parameters"], "register"),
    "_do_optimizer_sanity_check": (["self", "basic_optimizer"], "register"),
    "_configure_optimizer": (["self", "client_optimizer", "model_parameters"], "register"),
    "_backward_prologue": (["self"], "attach"),
    "_backward_epilogue": (["self"], "attach"),
    "_copy_recovery_script": (["self", "save_path"], "saving"),
    "_take_model_step": (["self", "lr_kwargs"], "attach"),
    "step": (["self", "lr_kwargs"], "attach"),
    "zero_reduce_bucket_size": (["self"], "observer"),
    "zero_optimization_stage": (["self"], "refusals"),
    "zero_reduce_scatter": (["self"], "sequences"),
    "fp16_enabled": (["self"], "refusals"),
    "torch_autocast_enabled": (["self"], "refusals"),
    "torch_autocast_dtype": (["self"], "refusals"),
    "is_deepcompile_enabled": (["self"], "refusals"),
    "super_offload": (["self"], "refusals"),
    "zero_quantized_gradients": (["self"], "refusals"),
    "bf16_master_weights_and_gradients": (["self"], "refusals"),
    "fp16_master_weights_and_gradients": (["self"], "refusals"),
    "zero_elastic_checkpoint": (["self"], "refusals"),
    "load_universal_checkpoint": (["self"], "refusals"),
    "get_data_types": (["self"], "compat"),
    "managed_gradient_accumulation": (["self"], "compat"),
    "compile": (["self", "backend", "compile_kwargs", "schedule", "compiled_autograd_enabled"], "refusals"),
}

#: Attributes of the engine, by the room that reads them.
ENGINE = {
    "attach": ["basic_optimizer", "optimizer", "global_rank"],
    "observer": ["device", "seq_data_parallel_group"],
    "saving": ["checkpoint_engine"],
    "wrappers": ["param_names"],
    "ranks": ["client_optimizer", "mpu"],
    "groups": ["mpu", "mp_world_size", "seq_data_parallel_group"],
    "sequences": ["seq_data_parallel_group", "sequence_parallel_size"],
    "refusals": [
        "_config", "zenflow", "mp_world_size", "sequence_parallel_size", "has_moe_layers", "gradient_average", "module",
    ],
}  # fmt: skip

#: Attributes of the wrapper that each engine gets, read by wrappers.py, scale.py and fused.py.
WRAPPERS = {
    "FP16_UnfusedOptimizer": (
        Case("VRLAMB", 0, "bf16", 2),
        ["optimizer", "fp16_groups", "fp32_groups", "clip_grad", "overflow", "_global_grad_norm", "loss_scale"],
    ),
    "BF16_Optimizer": (
        Case("VRLAMB", 1, "bf16", 2, "fp32"),
        ["optimizer", "bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group", "clip_grad", "overflow"],
    ),
    "DeepSpeedZeroOptimizer": (
        Case("VRLAMB", 2, "bf16", 2, reduction="observe"),
        [
            "optimizer", "round_robin_bit16_groups", "round_robin_bit16_offsets", "single_partition_of_fp32_groups",
            "real_dp_process_group", "clip_grad", "overflow", "_global_grad_norm", "loss_scale", "dp_process_group",
            "bit16_groups", "bit16_groups_flat", "averaged_gradients", "ready_for_gradients", "_release_ipg_buffers",
            "_build_compact_grad_partition_buffer", "_grad_acc_hooks", "_epilogue_ran_this_backward", "cpu_offload",
            "is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "_model_parallel_all_reduce",
        ],
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        Case("VRLAMB", 3, "bf16", 2, reduction="observe"),
        [
            "optimizer", "fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "grad_position",
            "get_param_id", "dp_process_group", "clip_grad", "overflow", "_global_grad_norm", "loss_scale",
            "averaged_gradients", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", "_grad_acc_hooks",
            "offload_optimizer", "_epilogue_ran_this_backward", "is_gradient_accumulation_boundary",
            "set_gradient_accumulation_boundary", "_model_parallel_all_reduce",
        ],
    ),
}  # fmt: skip


def missing_attributes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (case, attributes) in WRAPPERS.items():
        engine = build(case, 1)
        found[name] = {
            "class": type(engine.optimizer).__name__,
            "missing": [attribute for attribute in attributes if not hasattr(engine.optimizer, attribute)],
            "engine": [(room, a) for room, names in ENGINE.items() for a in names if not hasattr(engine, a)],
            "json": engine._config._param_dict["optimizer"]["type"],
            "offload": hasattr(engine._config.zero_config, "offload_optimizer"),
            "contiguous": hasattr(engine._config.zero_config, "contiguous_gradients"),
        }
        engine.destroy()
    return found


#: Functions of ``deepspeed.utils.groups`` that experts.py calls, and their parameters.
GROUPS = {
    "_get_expert_parallel_world_size": ["group_name"],
    "_get_expert_parallel_rank": ["group_name"],
}


@pytest.mark.parametrize("name", GROUPS)
def test_expert_groups_can_be_asked_for(name: str) -> None:
    function = getattr(groups, name, None)
    assert function is not None, f"deepspeed.utils.groups.{name} is gone; ds_vrgd/zero/experts.py needs it"
    parameters = list(inspect.signature(function).parameters)
    assert parameters == GROUPS[name], f"groups.{name} takes {parameters} now; see ds_vrgd/zero/experts.py"


def test_experts_are_marked_and_named_as_ever() -> None:
    expert = torch.nn.Parameter(torch.zeros(1))
    assert not is_moe_param(expert)
    expert.allreduce = False
    assert is_moe_param(expert), "DeepSpeed marks experts in another way now; see ds_vrgd/zero/experts.py"
    layer = Experts(torch.nn.Linear(2, 2), num_local_experts=2, expert_group_name="ep_size_2")
    assert {name for name, _ in layer.named_parameters()} == {
        f"deepspeed_experts.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    }, "DeepSpeed names experts in another way now; see ds_vrgd/zero/experts.py"
    assert {param.group_name for param in layer.parameters()} == {"ep_size_2"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_ranks(1, missing_attributes)[0]


@pytest.mark.parametrize("name", METHODS)
def test_engine_method_has_its_signature(name: str) -> None:
    expected, room = METHODS[name]
    method = getattr(DeepSpeedEngine, name, None)
    assert method is not None, f"DeepSpeedEngine.{name} is gone; ds_vrgd/zero/{room}.py needs it"
    parameters = list(inspect.signature(inspect.unwrap(method)).parameters)
    assert parameters == expected, f"DeepSpeedEngine.{name} takes {parameters} now; see ds_vrgd/zero/{room}.py"


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_has_its_bookkeeping(found: dict[str, Any], name: str) -> None:
    assert found[name]["class"] == name, (
        f"this engine is wrapped by {found[name]['class']} now; see ds_vrgd/zero/wrappers.py"
    )
    assert not found[name]["missing"], (
        f"{name} lost {found[name]['missing']}; see ds_vrgd/zero/wrappers.py, scale.py and fused.py"
    )


def test_engine_has_its_attributes(found: dict[str, Any]) -> None:
    for name in WRAPPERS:
        for room, attribute in found[name]["engine"]:
            pytest.fail(f"DeepSpeedEngine has no {attribute} now; ds_vrgd/zero/{room}.py reads it")
        assert found[name]["json"] == "VRLAMB", (
            "the JSON as the user spelled it is not in engine._config._param_dict now"
        )
        assert found[name]["offload"], (
            "engine._config.zero_config.offload_optimizer is gone; see ds_vrgd/zero/refusals.py"
        )
        assert found[name]["contiguous"], (
            "engine._config.zero_config.contiguous_gradients is gone; see ds_vrgd/zero/compat.py"
        )


def test_list_of_zero_optimizers_is_still_consulted() -> None:
    assert isinstance(zero_utils.ZERO_SUPPORTED_OPTIMIZERS, list), "see ds_vrgd/zero/register.py"
    assert "ZERO_SUPPORTED_OPTIMIZERS" in inspect.getsource(zero_utils.is_zero_supported_optimizer)


def test_split_weights_are_marked_as_deepspeed_looks_for_it() -> None:
    """By zero/groups.py; and a copy that another pipeline stage counts by the name in its constants."""
    weight = torch.nn.Parameter(torch.zeros(1))
    assert not is_split(weight)
    for mark in ("model_parallel", "tensor_model_parallel"):
        marked = torch.nn.Parameter(torch.zeros(1))
        setattr(marked, mark, True)
        assert is_split(marked), f"DeepSpeed no longer goes by .{mark}"
    assert PIPE_REPLICATED == "ds_pipe_replicated"


def test_tensor_parallel_group_is_asked_for_by_its_old_names_too() -> None:
    for name in ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"):
        assert bwc_tensor_model_parallel_group(SimpleNamespace(**{name: lambda: "group"})) == "group"
    assert bwc_tensor_model_parallel_group(None) is None
