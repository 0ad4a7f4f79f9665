"""The undocumented names of DeepSpeed that ``ds_vrgd/engines/deepspeed`` relies on.

When one of these fails, DeepSpeed has changed: read its new code, mend the module that is named, and only then raise
``MEASURED`` in ``ds_vrgd/engines/deepspeed/versions.py``, which has the tables.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import deepspeed.ops
import pytest
import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group

from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op
from ds_vrgd.engines.deepspeed.versions import ENGINE, FUSED, WRAPPERS, absent, changed_methods
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, build

#: A configuration that DeepSpeed wraps in each class.
CASES = {
    "FP16_UnfusedOptimizer": Case("VRLAMB", 0, "bf16", 2),
    "BF16_Optimizer": Case("VRLAMB", 1, "bf16", 2, "fp32"),
    "DeepSpeedZeroOptimizer": Case("VRLAMB", 2, "bf16", 2, reduction="observe"),
    "DeepSpeedZeroOptimizer_Stage3": Case("VRLAMB", 3, "bf16", 2, reduction="observe"),
}

#: Attributes of the wrappers with CPU offload, written by held.py.
OFFLOADED = {
    2: [
        "accumulated_grads_in_cpu",
        "norm_for_param_grads",
        "params_in_partition",
        "grad_position",
        "get_param_id",
        "local_overflow",
    ],
    3: ["norm_for_param_grads"],
}


def path(module: str) -> str:
    """Return where a module of the adapter is."""
    return f"ds_vrgd/engines/deepspeed/{module}.py"


def missing_attributes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        engine = build(case, 1)
        found[name] = {
            "class": type(engine.optimizer).__name__,
            "missing": absent(engine.optimizer, (*WRAPPERS[name], *FUSED.get(name, ()))),
            "engine": absent(engine, ENGINE),
            "json": engine._config._param_dict["optimizer"]["type"],
            "offload": hasattr(engine._config.zero_config, "offload_optimizer"),
        }
        engine.destroy()
    for stage, attributes in OFFLOADED.items():
        engine = build(Case("VRLAMB", stage, "fp32", 2, zero={"offload_optimizer": {"device": "cpu"}}), 1)
        found[f"offload {stage}"] = [name for name in attributes if not hasattr(engine.optimizer, name)]
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
    assert function is not None, f"deepspeed.utils.groups.{name} is gone; ds_vrgd/engines/deepspeed/experts.py needs it"
    parameters = list(inspect.signature(function).parameters)
    assert parameters == GROUPS[name], f"groups.{name} takes {parameters} now; see ds_vrgd/engines/deepspeed/experts.py"


def test_weights_of_stage_3_are_collected_as_ever() -> None:
    function = getattr(engine_module, "get_fp32_state_dict_from_zero_checkpoint", None)
    assert function is not None, (
        f"load_checkpoint collects the weights in another way now; see {path('checkpoints/restore')}"
    )
    parameters = list(inspect.signature(function).parameters)
    assert parameters[:2] == ["checkpoint_dir", "tag"], f"it takes {parameters} now; see {path('checkpoints/restore')}"


def test_experts_are_marked_and_named_as_ever() -> None:
    expert = torch.nn.Parameter(torch.zeros(1))
    assert not is_moe_param(expert)
    expert.allreduce = False
    assert is_moe_param(expert), "DeepSpeed marks experts in another way now; see ds_vrgd/engines/deepspeed/experts.py"
    layer = Experts(torch.nn.Linear(2, 2), num_local_experts=2, expert_group_name="ep_size_2")
    assert {name for name, _ in layer.named_parameters()} == {
        f"deepspeed_experts.{number}.{name}" for number in (0, 1) for name in ("weight", "bias")
    }, "DeepSpeed names experts in another way now; see ds_vrgd/engines/deepspeed/experts.py"
    assert {param.group_name for param in layer.parameters()} == {"ep_size_2"}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_ranks(1, missing_attributes)[0]


def test_engine_methods_have_their_signatures() -> None:
    assert changed_methods(DeepSpeedEngine) == [], f"see {path('versions')} and what calls them in its folder"


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapper_has_its_bookkeeping(found: dict[str, Any], name: str) -> None:
    assert found[name]["class"] == name, (
        f"this engine is wrapped by {found[name]['class']} now; see ds_vrgd/engines/deepspeed/wrappers.py"
    )
    assert not found[name]["missing"], (
        f"{name} lost {found[name]['missing']}; see ds_vrgd/engines/deepspeed/wrappers.py, held.py and fused.py"
    )


def test_engine_has_its_attributes(found: dict[str, Any]) -> None:
    for name in WRAPPERS:
        assert not found[name]["engine"], f"DeepSpeedEngine lost them; see what reads them beside {path('versions')}"
        assert found[name]["json"] == "VRLAMB", (
            "the JSON as the user spelled it is not in engine._config._param_dict now"
        )
        assert found[name]["offload"], (
            "engine._config.zero_config.offload_optimizer is gone; see ds_vrgd/engines/deepspeed/refusals.py"
        )


@pytest.mark.parametrize("stage", OFFLOADED)
def test_offloading_wrapper_has_its_buffers(found: dict[str, Any], stage: int) -> None:
    assert not found[f"offload {stage}"], (
        f"stage {stage} lost {found[f'offload {stage}']}; see ds_vrgd/engines/deepspeed/held.py"
    )


def test_hooks_on_accumulated_gradients_run_in_the_order_of_their_dict() -> None:
    """edited.py lets DeepSpeed's own hook run last by inserting it anew."""
    weight, order = torch.nn.Parameter(torch.zeros(1)), []
    first = weight.register_post_accumulate_grad_hook(lambda param: order.append("first"))
    weight.register_post_accumulate_grad_hook(lambda param: order.append("second"))
    hooks = weight._post_accumulate_grad_hooks
    assert hooks is not None
    hooks[first.id] = hooks.pop(first.id)
    weight.sum().backward()
    assert order == ["second", "first"], "torch keeps them elsewhere now; see ds_vrgd/engines/deepspeed/edited.py"


def test_views_of_a_flat_gradient_know_their_place() -> None:
    """fused.py cuts the sums like DeepSpeed's own buffer, and edited.py sees which view is asked for."""
    flat = torch.zeros(6)
    views = GradPartitionBufferGroup([flat[:2], flat[2:].view(2, 2)], flat)
    assert views._view_specs == [(0, (2,), False), (2, (2, 2), False)], f"see {path('fused')} and {path('edited')}"


def test_operation_on_shared_memory_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__, f"DeepSpeed asks another table; see {path('cpu')}"
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    leave_out_shared_memory_op()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False


def test_a_node_that_accumulates_is_known_to_the_hooks_before_it() -> None:
    """moments/hooks.py sees a gradient after all tensor hooks through a pre-hook of this node."""
    weight, names = torch.nn.Parameter(torch.zeros(1)), []
    weight.register_hook(lambda grad: names.append(torch._C._current_autograd_node().name()))
    weight.sum().backward()
    assert names == ["torch::autograd::AccumulateGrad"], "see ds_vrgd/moments/hooks.py"


def test_list_of_zero_optimizers_is_still_consulted() -> None:
    assert isinstance(zero_utils.ZERO_SUPPORTED_OPTIMIZERS, list), "see ds_vrgd/engines/deepspeed/register.py"
    assert "ZERO_SUPPORTED_OPTIMIZERS" in inspect.getsource(zero_utils.is_zero_supported_optimizer)


def test_split_weights_are_marked_as_deepspeed_looks_for_it() -> None:
    """groups.py goes by these marks, and for a copy that another pipeline stage counts by the name of a constant."""
    weight = torch.nn.Parameter(torch.zeros(1))
    assert not is_model_parallel_parameter(weight)
    for mark in ("model_parallel", "tensor_model_parallel"):
        marked = torch.nn.Parameter(torch.zeros(1))
        setattr(marked, mark, True)
        assert is_model_parallel_parameter(marked), f"DeepSpeed no longer goes by .{mark}"
    assert PIPE_REPLICATED == "ds_pipe_replicated"


def test_tensor_parallel_group_is_asked_for_by_its_old_names_too() -> None:
    for name in ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"):
        assert bwc_tensor_model_parallel_group(SimpleNamespace(**{name: lambda: "group"})) == "group"
    assert bwc_tensor_model_parallel_group(None) is None
