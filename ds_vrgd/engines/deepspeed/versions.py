"""The releases of DeepSpeed and torch that this package is run against, and DeepSpeed's private parts that it needs.

No other module names a release. ``pyproject.toml`` has the same floors (a test compares), and docs/COMPATIBILITY.md the
measurements. A release that is newer than those is not refused: its private parts are compared with the tables below.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ds_vrgd.extras import UnsupportedRelease
from ds_vrgd.optim import world

#: Older releases hand over a wrong mean in several configurations, and fused mode cannot replace their reduction.
DEEPSPEED = ">=0.19.8"
TORCH = ">=2.9"
#: The newest releases that docs/COMPATIBILITY.md has figures of.
MEASURED = {"DeepSpeed": "0.19.8", "torch": "2.13"}
#: Older releases call no tensor hook for a parameter of an autograd.Function inside a non-reentrant checkpoint, such as
#: DeepSpeed's own linear layer at stage 3.
HOOKS = ">=2.10"

#: The faults of older releases of DeepSpeed that a refusal names.
FAULTS = {
    ">=0.18.3,<=0.19.3": (
        "ZeRO-2 in bf16 computes wrong gradients where a submodule runs twice in a step (DeepSpeed issue 8224)"
    ),
    "<0.19.8": "several configurations reduce the gradients wrongly, others in each release",
}

#: The environment variable that turns the error into a warning if it is 1.
OVERRIDE = "DS_VRGD_ANY_VERSION"

RISK = (
    "DeepSpeed's gradient path may differ there in ways that no check of ds_vrgd notices: gradients, statistics and "
    "updates may be silently wrong, and checkpoints may not load"
)

#: Methods of ``DeepSpeedEngine`` that are wrapped or called, with their parameters after ``self``.
METHODS = {
    "optimizer_name": "", "_is_supported_optimizer": "optimizer_name", "_configure_distributed_model": "model",
    "_configure_basic_optimizer": "model_parameters", "_do_optimizer_sanity_check": "basic_optimizer",
    "_configure_optimizer": "client_optimizer model_parameters", "forward": "inputs kwargs",
    "backward": "loss retain_graph scale_wrt_gas", "_backward_prologue": "", "_backward_epilogue": "",
    "_backward_prologue_per_tensor": "grad", "zero_grad": "",
    "destroy": "", "is_gradient_accumulation_boundary": "", "zero_optimization_partition_gradients": "",
    "allreduce_gradients": "bucket_size", "_take_model_step": "lr_kwargs", "step": "lr_kwargs",
    "zero_reduce_bucket_size": "", "zero_optimization_stage": "", "zero_reduce_scatter": "",
    "fp16_enabled": "", "torch_autocast_enabled": "", "torch_autocast_dtype": "", "is_deepcompile_enabled": "",
    "super_offload": "", "bf16_master_weights_and_gradients": "",
    "fp16_master_weights_and_gradients": "", "zero_elastic_checkpoint": "", "load_universal_checkpoint": "",
    "get_data_types": "", "managed_gradient_accumulation": "",
    "load_checkpoint":
        "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only "
        "custom_load_fn",
    "compile": "backend compile_kwargs schedule compiled_autograd_enabled",
}  # fmt: skip

#: Attributes of an engine that is built.
ENGINE = (
    "_config", "_is_gradient_accumulation_boundary", "_running_engine_backward", "basic_optimizer", "client_optimizer",
    "communication_data_type", "device", "dp_world_size", "global_rank", "gradient_average", "has_moe_layers",
    "inside_no_sync_ctxt", "module", "mp_world_size", "mpu", "optimizer", "param_names", "seq_data_parallel_group",
    "sequence_parallel_size", "torch_autocast_z0_gradscaler", "zenflow",
)  # fmt: skip

_SHARED = ("optimizer", "clip_grad", "overflow", "_global_grad_norm", "loss_scale")
_SHARED_ZERO = (
    *_SHARED, "dp_process_group", "averaged_gradients", "is_gradient_accumulation_boundary",
    "set_gradient_accumulation_boundary", "finalize_gradient_accumulation_boundary", "clear_backward_seen_flag",
    "zero_grad",
)  # fmt: skip
#: Attributes of DeepSpeed's wrapper around the optimizer, by the name of its class.
WRAPPERS = {
    "FP16_UnfusedOptimizer": (*_SHARED, "fp16_groups", "fp32_groups", "refresh_fp32_params"),
    "BF16_Optimizer": (
        "optimizer", "bf16_groups", "fp32_groups_flat_partition", "real_dp_process_group", "clip_grad", "overflow",
    ),
    "DeepSpeedZeroOptimizer": (
        *_SHARED_ZERO, "round_robin_bit16_groups", "round_robin_bit16_offsets", "single_partition_of_fp32_groups",
        "real_dp_process_group", "all_grad_tensors", "cpu_offload", "overlap_comm", "partition_gradients",
        "bit16_groups", "setup_buckets", "ipg_buckets", "params_already_reduced", "get_param_id",
        "get_gradient_for_reduction", "reduce_ready_partitions_and_remove_grads", "reduce_gradients",
    ),
    "DeepSpeedZeroOptimizer_Stage3": (
        *_SHARED_ZERO, "fp16_groups", "fp32_partitioned_groups_flat", "sub_group_to_group_id", "grad_position",
        "get_param_id", "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", "grad_partitions_flat_buffer",
        "offload_optimizer",
    ),
}  # fmt: skip
_SHARED_FUSED = ("_grad_acc_hooks", "_epilogue_ran_this_backward", "_model_parallel_all_reduce")
#: Further ones, which fused mode alone needs.
FUSED = {
    "DeepSpeedZeroOptimizer": (
        *_SHARED_FUSED, "bit16_groups_flat", "ready_for_gradients", "_release_ipg_buffers",
        "_build_compact_grad_partition_buffer",
    ),
    "DeepSpeedZeroOptimizer_Stage3": _SHARED_FUSED,
}  # fmt: skip


def check_versions(deepspeed: str, torch: str) -> None:
    """Refuse a version of DeepSpeed or of torch that is older than the supported ones, or that names no release.

    Raises:
        UnsupportedRelease: naming each version found, what is wrong with it, the supported ones, and the override.
    """
    faults = " and ".join(fault for releases, fault in FAULTS.items() if is_among(deepspeed, releases))
    outside = [
        f"{name} {version} is not among the supported releases, {name.lower()}{supported}{f': {why}' if why else ''}"
        for name, version, supported, why in (("DeepSpeed", deepspeed, DEEPSPEED, faults), ("torch", torch, TORCH, ""))
        if not is_among(version, supported)
    ]
    if outside:
        _refuse(f"{'; '.join(outside)} (docs/COMPATIBILITY.md has the measurements). Install a supported release")
    elif not is_among(torch, HOOKS):
        world.warn(
            f"torch {torch} hides the gradients of an autograd.Function inside a non-reentrant activation checkpoint "
            "from ds_vrgd's observe mode, which would count them as zero. Use use_reentrant=True there, or "
            f"torch{HOOKS}."
        )


def check_class(engine: type, version: str) -> None:
    """Compare the methods of the engine class of a DeepSpeed that is newer than the measured ones.

    Raises:
        UnsupportedRelease: methods are missing, or take other parameters.
    """
    if is_newer("DeepSpeed", version):
        _refuse_changes(version, [f"DeepSpeedEngine.{name}" for name in changed_methods(engine)])


def changed_methods(engine: type) -> list[str]:
    """Return the methods of :data:`METHODS` that an engine class lacks, or has with other parameters."""
    return [
        name
        for name, parameters in METHODS.items()
        if (method := getattr(engine, name, None)) is None
        or parameters_of(inspect.unwrap(method)) != ["self", *parameters.split()]
    ]


def check_engine(engine: Any, version: str) -> None:
    """Compare an engine of a DeepSpeed that is newer than the measured ones, and warn about it.

    Raises:
        UnsupportedRelease: the engine, or its wrapper around the optimizer, lacks attributes.
    """
    if is_newer("DeepSpeed", version):
        wrapper, name = engine.optimizer, type(engine.optimizer).__name__
        missing = [f"DeepSpeedEngine.{each}" for each in absent(engine, ENGINE)]
        _refuse_changes(version, missing + [f"{name}.{each}" for each in absent(wrapper, WRAPPERS.get(name, ()))])
    found = {"DeepSpeed": version, "torch": torch.__version__}
    newer = " and ".join(f"{name} {found[name]}" for name in found if is_newer(name, found[name]))
    if newer and world.is_first():
        world.warn(
            f"{newer}: newer than the releases that ds_vrgd was measured with (DeepSpeed {MEASURED['DeepSpeed']}, "
            f"torch {MEASURED['torch']}). The parts of DeepSpeed that it relies on are there. Check the numbers once: "
            "ds-vrgd doctor --deepspeed_config X.json"
        )


def absent(owner: Any, names: Iterable[str]) -> list[str]:
    """Return the attributes that an object lacks."""
    return [name for name in names if not hasattr(owner, name)]


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters, which DeepSpeed's profiling decorator hides."""
    inner = inspect.getclosurevars(method).nonlocals.get("func")
    return list(inspect.signature(method if inner is None else inner).parameters)


def is_newer(name: str, version: str) -> bool:
    """Return whether a version of DeepSpeed or torch is newer than the releases that were measured."""
    return is_among(version, f">{MEASURED[name]},!={MEASURED[name]}.*")


def is_among(version: str, supported: str) -> bool:
    """Return whether a release is supported; a development or local build counts as the release that it names.

    A build that names no release (a source tree says 0.0.0 or "unknown") is not.
    """
    try:
        return Version(Version(version).base_version) in SpecifierSet(supported)
    except InvalidVersion:
        return False


def _refuse_changes(version: str, changed: list[str]) -> None:
    if changed:
        _refuse(
            f"DeepSpeed {version} is newer than {MEASURED['DeepSpeed']}, the last release that ds_vrgd was measured "
            f"with, and has changed or removed {', '.join(changed)}, which ds_vrgd relies on. Install "
            f"deepspeed=={MEASURED['DeepSpeed']} or a newer ds_vrgd"
        )


def _refuse(reason: str) -> None:
    if os.environ.get(OVERRIDE) != "1":
        raise UnsupportedRelease(f"{reason}, or set {OVERRIDE}=1 to continue at your own risk. {RISK}.")
    world.warn(f"{reason}. ds_vrgd continues because {OVERRIDE}=1 is set. {RISK}.")
