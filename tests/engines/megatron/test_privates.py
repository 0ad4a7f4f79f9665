"""The private parts of Megatron-Core that ``ds_vrgd/engines/megatron`` relies on.

When one of these fails, Megatron-Core has changed: read its new code, and mend the file that the message names.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

pytestmark = pytest.mark.slow  # importing Megatron-Core takes seconds

OPTIMIZER, EXCHANGE = "optimizer.py", "exchange.py"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
#: Owner, name, parameters after ``self``, our file.
METHODS = [
    ("megatron.core.optimizer", "get_megatron_optimizer",
     "config model_chunks config_overrides use_gloo_process_groups pg_collection dump_param_to_param_group_map",
     OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MixedPrecisionOptimizer", "prepare_grads", "", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MixedPrecisionOptimizer", "step_with_ready_grads", "", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.FP32Optimizer", "prepare_grads", "", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "_filter_and_reorder_param_groups",
     "current_groups state_dict_groups", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "_extract_common_per_param_step", "state_dict", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "_restore_common_per_param_step", "state_dict step",
     OPTIMIZER),
    ("megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params", "_copy_model_grads_to_main_grads", "",
     OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "get_parameters", "", "observer.py"),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "get_grad_stats_parallel_group", "", "observer.py"),
    (DISTRIBUTED, "_copy_model_grads_to_main_grads", "", OPTIMIZER),
    (DISTRIBUTED, "_get_model_param_range_map", "param", OPTIMIZER),
    (DISTRIBUTED, "_get_main_param_and_optimizer_states",
     "model_param", OPTIMIZER),
    (DISTRIBUTED, "_set_main_param_and_optimizer_states",
     "model_param tensors", OPTIMIZER),
    (DISTRIBUTED, "load_parameter_state_from_dp_reshardable",
     "state_dict", OPTIMIZER),
    (DISTRIBUTED, "load_parameter_state_from_fully_reshardable",
     "state_dict", OPTIMIZER),
    (DISTRIBUTED, "save_parameter_state", "filename", OPTIMIZER),
    (DISTRIBUTED, "get_parameter_state_dp_zero",
     "use_gloo_comm empty_data return_on_all_ranks", OPTIMIZER),
    (DISTRIBUTED, "sharded_state_dict",
     "model_sharded_state_dict is_loading sharding_type metadata", OPTIMIZER),
    ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup", "start_grad_sync", "force_all_reduce",
     EXCHANGE),
    ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup", "check_grads",
     "check_for_nan_or_inf check_for_large", EXCHANGE),
    ("megatron.core.distributed.DistributedDataParallel", "zero_grad_buffer", "", "observer.py"),
]  # fmt: skip
#: Owner, attributes that its code sets or reads, our file.
ATTRIBUTES = [
    ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
     "buckets ddp_config intra_distributed_optimizer_instance_group data_parallel_group is_first_batch "
     "grad_reduce_handle per_param_grad_ready_counts", EXCHANGE),
    ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucket", "params_list grad_data offset", EXCHANGE),
    ("megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer", "buckets param_index_map grad_dtype numel",
     OPTIMIZER),
    ("megatron.core.distributed.DistributedDataParallel",
     "ddp_config buffers bucket_groups dp_cp_group tp_group pp_group", "observer.py"),
    (DISTRIBUTED,
     "model_fp32_groups model_float16_groups shard_fp32_groups shard_fp32_from_float16_groups data_parallel_group "
     "buffers gbuf_ranges model_param_group_index_map", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
     "fp32_from_fp32_groups float16_groups fp32_from_float16_groups", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.MegatronOptimizer", "optimizer config init_state_fn", OPTIMIZER),
    ("megatron.core.optimizer.optimizer.ChainedOptimizer", "chained_optimizers config", OPTIMIZER),
]  # fmt: skip


def found(path: str) -> object:
    """Return a module, or a class of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("owner", "name", "params", "ours"), METHODS)
def test_functions_and_methods(owner: str, name: str, params: str, ours: str) -> None:
    function = getattr(found(owner), name, None)
    where = f"ds_vrgd/engines/megatron/{ours}"
    assert function is not None, f"{owner}.{name} is gone: {where}"
    have = [param for param in inspect.signature(function).parameters if param != "self"]
    assert have == params.split(), f"{owner}.{name} has other parameters: {where}"


@pytest.mark.parametrize(("owner", "names", "ours"), ATTRIBUTES)
def test_attributes(owner: str, names: str, ours: str) -> None:
    source = inspect.getsource(found(owner))  # type: ignore[arg-type]
    for name in names.split():
        assert f"self.{name}" in source, f"{owner}.{name} is gone: ds_vrgd/engines/megatron/{ours}"


def test_the_gradients_of_a_norm_come_without_copies() -> None:
    """Since 0.17 there are parameters with a norm of their own, which only the filter itself does not leave out."""
    optimizer = importlib.import_module("megatron.core.optimizer.optimizer").MegatronOptimizer
    name = "_filter_grads_for_norm" if hasattr(optimizer, "_filter_grads_for_norm") else "get_main_grads_for_grad_norm"
    source = inspect.getsource(getattr(optimizer, name))
    for mark in ("param_is_not_shared(", "param_is_not_tensor_parallel_duplicate(", "return grads_for_norm"):
        assert mark in source, f"MegatronOptimizer.{name} has no {mark}: ds_vrgd/engines/megatron/observer.py"


def test_whole_states_are_read_by_the_ranges_of_the_buffer() -> None:
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    source = inspect.getsource(optimizer.sharded_param_state_fully_reshardable)
    for part in (
        "self.get_parameter_state_dp_zero(", ") in buffer.param_index_map.items():",
        "for state_key in world_tensor_keys:", "world_tensors[state_key][param_world_start:param_world_end]",
    ):  # fmt: skip
        assert part in source, f"DistributedOptimizer no longer has {part}: ds_vrgd/engines/megatron/optimizer.py"


def test_a_bucket_group_asks_itself_for_the_reduction_and_waits_for_a_handle() -> None:
    """``start_grad_sync`` is replaced on the object, and its handle has ``wait``."""
    group = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")._ParamAndGradBucketGroup
    assert "self.start_grad_sync(force_all_reduce=force_all_reduce)" in inspect.getsource(group.finish_grad_sync)
    assert "self.start_grad_sync(" in inspect.getsource(group.register_grad_ready)
    assert "self.grad_reduce_handle.wait()" in inspect.getsource(group.finish_grad_sync)
