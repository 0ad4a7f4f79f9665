"""Configurations under which the result could not be exact: refused when the engine is built."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vrgd.optim import unused_over
from ds_vrgd.zero.compat import defects, setting
from ds_vrgd.zero.experts import refuse_experts
from ds_vrgd.zero.groups import tensor_parallel_group
from ds_vrgd.zero.pipeline import PIPELINE
from ds_vrgd.zero.sequences import refuse_sequences
from ds_vrgd.zero.tensor_parallel import TENSOR_PARALLEL

Engine = Any

STAGE_3_LINEAR = "deepspeed.runtime.zero.linear"  # the module of what DeepSpeed puts in place of torch's

# Backend aot_eager, torch 2.11, two GPUs. In a process of their own stages 0, 1 and 2 give the hooks the plain model's
# gradients, bitwise, and stage 3 after them does not. In a process that had run 160 other configurations, stage 3 among
# them, training followed the reference at no stage. Such a process keeps stage 3's own linear: the suspect, and not
# convicted, for on CPU ranks all is exact with it.
COMPILED_ON_SEVERAL_DEVICES = (
    "torch.compile or engine.compile() with several accelerators at zero_optimization.stage=3, or in a process that "
    "has run stage 3 before: training is not exact there yet. Leave it out, or use stage 0, 1 or 2 in a new process, "
    "or one accelerator"
)


def _stage(engine: Engine) -> int:
    return int(engine.zero_optimization_stage())


def _fp16_without_zero(engine: Engine) -> str | None:
    if engine.fp16_enabled() and _stage(engine) == 0:
        return (
            "fp16.enabled=true with zero_optimization.stage=0: DeepSpeed never scales the loss there but still "
            "divides the gradient by the loss scale. Use stage 1, 2 or 3, or bf16"
        )
    return None


def _fp16_autocast(engine: Engine) -> str | None:
    if (
        setting(engine, "torch_autocast_enabled")
        and engine.torch_autocast_dtype() == torch.float16
        and _stage(engine) > 0
    ):
        return (
            "torch_autocast.dtype=float16 with ZeRO: each rank decides alone whether it skips an overflowing step, and "
            "the ranks would wait for each other for ever. Use torch_autocast.dtype=bfloat16, or fp16.enabled=true"
        )
    return None


def _deepcompile(engine: Engine) -> str | None:
    if engine.is_deepcompile_enabled():
        return (
            "compile.deepcompile=true: gradients are reduced inside the graph, where no rank's own can be seen. "
            "Set it to false"
        )
    return None


def _zenflow(engine: Engine) -> str | None:
    if getattr(engine, "zenflow", False):
        return (
            "zero_optimization.zenflow: it updates selected channels with an optimizer of its own. Remove that section"
        )
    return None


def _super_offload(engine: Engine) -> str | None:
    if setting(engine, "super_offload"):
        return "offload_optimizer.super_offload=true: it steps with its own CPU Adam instead. Set it to false"
    return None


def _partial_offload(engine: Engine) -> str | None:
    offload = engine._config.zero_config.offload_optimizer
    if offload is not None and offload.ratio < 1.0:
        return f"offload_optimizer.ratio={offload.ratio}: part of the step is done by another Adam. Set it to 1.0"
    return None


def _nvme_offload(engine: Engine) -> str | None:
    zero = engine._config.zero_config
    if _device(zero.offload_optimizer) == "nvme":
        return (
            "offload_optimizer.device=nvme: after load_checkpoint() DeepSpeed trains on without the optimizer's state, "
            "and with the first weights of every small sub-group. Use cpu"
        )
    if _device(zero.offload_param) == "nvme":
        return (
            "offload_param.device=nvme: DeepSpeed's load_checkpoint() fails on parameters that are on NVMe, and the "
            "run could not be resumed. Use cpu"
        )
    return None


def _device(offload: Any | None) -> str:
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _sparse_gradients(engine: Engine) -> str | None:
    for name, module in engine.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            return (
                f"{type(module).__name__}(sparse=True) at '{name}': its gradients are sparse tensors. Set sparse=False"
            )
    return None


def _compiles_inexactly(engine: Engine) -> bool:
    """On several accelerators at stage 3, or where it has left its own ``torch.nn.functional.linear`` behind."""
    has_its_linear = torch.nn.functional.linear.__module__ == STAGE_3_LINEAR
    several = engine.device.type != "cpu" and torch.distributed.get_world_size() > 1
    return several and (_stage(engine) == 3 or has_its_linear)


def _compiled_model(engine: Engine) -> str | None:
    is_compiled = any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in engine.module.modules()
    )
    return COMPILED_ON_SEVERAL_DEVICES if is_compiled and _compiles_inexactly(engine) else None


def _half_precision_masters(engine: Engine) -> str | None:
    for name, enabled in (
        ("bf16.bf16_master_weights_and_grads", setting(engine, "bf16_master_weights_and_gradients")),
        ("fp16.fp16_master_weights_and_grads", engine.fp16_master_weights_and_gradients()),
    ):
        if enabled:
            return f"{name}=true: updates smaller than the weights' rounding would be lost. Set it to false"
    return None


def _model_parallel(engine: Engine) -> str | None:
    group = tensor_parallel_group(engine)
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    if engine.mp_world_size != ranks and not isinstance(engine, PipelineEngine):
        return (
            f"a model-parallel group of {engine.mp_world_size} ranks with {ranks} in the tensor-parallel group: "
            "pipeline parallelism without deepspeed's PipelineModule. Use that, or tensor and data parallelism alone"
        )
    return None


def _summed_gradients(engine: Engine) -> str | None:
    if not engine.gradient_average:
        return "gradient_allreduce_op=sum: the mean over the ranks is part of the definition. Use the default, mean"
    return None


def _elastic_checkpoint(engine: Engine) -> str | None:
    if engine.zero_elastic_checkpoint():
        return (
            "zero_optimization.elastic_checkpoint=true: DeepSpeed then saves the state without the param groups' "
            "options, and could not load it. Set it to false; ds-vrgd to-universal changes the number of ranks"
        )
    return None


def _universal_without_zero(engine: Engine) -> str | None:
    if engine.load_universal_checkpoint() and _stage(engine) == 0:
        return (
            "checkpoint.load_universal=true with zero_optimization.stage=0: DeepSpeed would leave the weights as they "
            "are. Set it to false: without ZeRO a checkpoint loads as it is at any number of ranks"
        )
    return None


REFUSALS: tuple[Callable[[Engine], str | None], ...] = (
    _fp16_without_zero,
    _fp16_autocast,
    _deepcompile,
    _zenflow,
    _super_offload,
    _partial_offload,
    _nvme_offload,
    _sparse_gradients,
    _compiled_model,
    _half_precision_masters,
    *PIPELINE,
    _model_parallel,
    *TENSOR_PARALLEL,
    refuse_sequences,
    refuse_experts,
    _summed_gradients,
    _elastic_checkpoint,
    _universal_without_zero,
)


def refuse_inexact(engine: Engine, optimizer: str) -> None:
    """Raise for every setting of the engine that cannot be exact, all in one message.

    Raises:
        ValueError: each setting with its value, the reason and the way out.
    """
    found = [reason for check in REFUSALS if (reason := check(engine)) is not None] + defects(engine)
    if found:
        listed = "\n".join(f"  - {reason}." for reason in found)
        raise ValueError(f"{optimizer} cannot be exact under this configuration:\n{listed}")


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer of ours was made for these parameters, and another one has come into the engine.

    Accelerate and the Hugging Face Trainer do so without a word: see the message.

    Raises:
        RuntimeError: naming both, and what each of the known causes wants instead.
    """
    ours = unused_over(param for group in optimizer.param_groups for param in group["params"])
    if ours is not None:
        name, other = type(ours).__name__, type(optimizer).__name__
        raise RuntimeError(
            f"{name} was made for these parameters, but the engine was given {other}, and would train with that. Known "
            "causes:\n"
            "  - Accelerate replaces the optimizer where offload_optimizer.device is set: give the DeepSpeed config "
            '"zero_force_ds_cpu_optimizer": false, or name the optimizer in its "optimizer" section.\n'
            "  - The Hugging Face Trainer drops optimizers=(optimizer, ...) under DeepSpeed: pass "
            f"optimizer_cls_and_kwargs=(ds_vrgd.{name}, {{...}}).\n"
            f"If {other} is what you want, delete the {name} before you build the engine."
        )


def guard_compile(engine: Engine) -> None:
    """Have this engine's ``compile`` refuse what would hide or change the gradients."""
    compile_engine = engine.compile

    @functools.wraps(compile_engine)
    def checked(*args: Any, compiled_autograd_enabled: bool = False, **kwargs: Any) -> None:
        if compiled_autograd_enabled:
            raise ValueError(
                "engine.compile(compiled_autograd_enabled=True): gradients could not be seen before they are reduced. "
                "Leave it at False"
            )
        if _compiles_inexactly(engine):
            raise ValueError(COMPILED_ON_SEVERAL_DEVICES)
        compile_engine(*args, **kwargs)

    engine.compile = checked
