"""The configurations under which the result could not be exact, by topic. They are refused before any training.

A reason has the setting with its value, why, and the way out. Reasons of one topic share a function, which yields them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import has_comm_dtype
from deepspeed.utils import groups, logger
from torch.distributed import get_process_group_ranks

from ds_vrgd.engines.deepspeed.parallel import EXPERT, Engine, chunk_ranks, tensor_parallel_group
from ds_vrgd.engines.deepspeed.pipeline import tied_weights
from ds_vrgd.optim import VROptimizer, unused_over

STAGE_3_LINEAR = "deepspeed.runtime.zero.linear"  # the module of what DeepSpeed puts in place of torch's

# Backend aot_eager, torch 2.11, two GPUs. In a process of their own, stages 0, 1 and 2 give the hooks the plain model's
# gradients, bitwise, and stage 3 after them does not. In a process that had run 160 other configurations, stage 3 among
# them, training followed the reference at no stage. Such a process keeps stage 3's own linear, which is a suspect only:
# on CPU ranks everything is exact with it.
COMPILED_ON_SEVERAL_DEVICES = (
    "torch.compile or engine.compile() with several accelerators at zero_optimization.stage=3, or in a process that "
    "has run stage 3 before: training is not exact there yet. Leave it out, or use stage 0, 1 or 2 in a new process, "
    "or one accelerator"
)
_ROUNDED = "DeepSpeed rounds the mean of the gradients to 16 bits, and the step would be taken with that mean"
_LOST_UPDATES = "updates smaller than the weights' rounding would be lost. Set it to false"
_QUANTIZED = "the model computes with 8-bit weights, which was never compared with the reference. Set it to false"
_WITH_MPU = (
    "Call deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel({}) and pass that module "
    "to deepspeed.initialize as mpu"
)


def _sums_bf16_in_fp32(engine: Engine) -> bool:
    """Return whether bf16 weights have ``data_types.grad_accum_dtype`` fp32: DeepSpeed's BF16_Optimizer at stage 1."""
    return bool(engine.get_data_types() == (torch.bfloat16, torch.float32))


def _of_chunks(engine: Engine) -> Iterator[str]:
    """Yield the reason if some layer has one chunk in each window of this many accumulation steps and ranks."""
    names = {param.group_name for param in engine.module.parameters() if is_moe_param(param)}
    experts = max((groups._get_expert_parallel_world_size(name) for name in names), default=1)
    steps, ranks = engine.gradient_accumulation_steps(), chunk_ranks(engine)
    if steps * ranks <= experts and engine.managed_gradient_accumulation():
        shared = f"{ranks} data-parallel rank{'s' * (ranks > 1)}{', all with other experts,' * (experts > 1)}"
        yield (
            f"gradient_accumulation_steps={steps} on {shared} makes k = 1 chunk in every step, and a variance needs at "
            "least 2. Raise gradient_accumulation_steps (a smaller micro-batch keeps the batch size), use more ranks, "
            "or set gamma=1.0 for the base optimizer"
        )


def _of_rounded_mean(engine: Engine) -> Iterator[str]:
    """Yield what sums gradients in 16 bits other than those of the weights, or in 16 bits for fp32 weights."""
    weights, accumulation = engine.get_data_types()
    dtypes = {"communication_data_type": engine.communication_data_type, "data_types.grad_accum_dtype": accumulation}
    for setting, dtype in dtypes.items():
        if dtype not in (weights, torch.float32):
            rounded, kept = (str(each).removeprefix("torch.") for each in (dtype, weights))
            yield f"{setting}={rounded} with {kept} weights: {_ROUNDED}. Leave it out"
    # Under ZeRO autocast also decides in what dtype the gradients of some layers are summed.
    autocasts = engine.torch_autocast_enabled() and engine.zero_optimization_stage() > 0
    if autocasts and any(has_comm_dtype(param) for param in engine.module.parameters()):
        yield (
            "torch_autocast with ZeRO, for linear and convolution layers "
            f"(torch_autocast.lower_precision_safe_modules): {_ROUNDED}. Set "
            "torch_autocast.lower_precision_safe_modules to [], which leaves autocast itself as it is, or use stage 0"
        )


def _of_optimizer(engine: Engine, optimizer: VROptimizer) -> Iterator[str]:
    """Yield what the optimizer's arguments cannot be combined with."""
    if any(group["gamma"] < 1.0 for group in optimizer.param_groups):
        yield from _of_chunks(engine)
    # The step is taken with the mean of DeepSpeed: without GSNR, and at stage 0 in fp32.
    without_gsnr = any(group["gamma"] >= 1.0 for group in optimizer.param_groups)
    if without_gsnr or (engine.zero_optimization_stage() == 0 and engine.get_data_types()[0] == torch.float32):
        yield from _of_rounded_mean(engine)
    prenormalizes = any(group.get("prenormalize", False) for group in optimizer.param_groups)
    if prenormalizes and not getattr(engine._config.zero_config, "compute_grad_norm", True):
        yield "zero_optimization.compute_grad_norm=false with prenormalize, which divides by that norm. Set it to true"


def _of_precision(engine: Engine) -> Iterator[str]:
    """Yield what rounds or scales gradients and weights otherwise than the definition."""
    stage, zero = engine.zero_optimization_stage(), engine._config.zero_config
    if engine.fp16_enabled() and stage == 0:
        yield (
            "fp16.enabled=true with zero_optimization.stage=0: DeepSpeed never scales the loss there but still divides "
            "the gradient by the loss scale. Use stage 1, 2 or 3, or bf16"
        )
    if engine.torch_autocast_enabled() and stage > 0 and engine.torch_autocast_dtype() == torch.float16:
        yield (
            "torch_autocast.dtype=float16 with ZeRO: each rank decides alone whether it skips an overflowing step, and "
            "the ranks would wait for each other for ever. Use torch_autocast.dtype=bfloat16, or fp16.enabled=true"
        )
    if engine.bf16_master_weights_and_gradients():
        yield f"bf16.bf16_master_weights_and_grads=true: {_LOST_UPDATES}"
    if engine.fp16_master_weights_and_gradients():
        yield f"fp16.fp16_master_weights_and_grads=true: {_LOST_UPDATES}"
    if not engine.gradient_average:
        yield "gradient_allreduce_op=sum: the mean over the ranks is part of the definition. Use the default, mean"
    if stage == 3 and zero.zero_quantized_gradients:  # ZeRO++. Other stages ignore it.
        yield "zero_optimization.zero_quantized_gradients=true: DeepSpeed sums 4-bit gradients. Set it to false"
    for setting in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if stage == 3 and getattr(zero, setting):
            yield f"zero_optimization.{setting}=true: {_QUANTIZED}"


def _of_model(engine: Engine) -> Iterator[str]:
    """Yield what hides or changes the gradients of the model."""
    if engine.is_deepcompile_enabled():
        yield "compile.deepcompile=true: gradients are reduced in the graph, where no hook sees them. Set it to false"
    compiled = (
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in engine.module.modules()
    )
    if _compiles_inexactly(engine) and any(compiled):  # guard_compile() follows later calls
        yield COMPILED_ON_SEVERAL_DEVICES
    for name, module in engine.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            kind = type(module).__name__
            yield f"{kind}(sparse=True) at '{name}': its gradients are sparse tensors. Set sparse=False"
            break


def _compiles_inexactly(engine: Engine) -> bool:
    """Return whether there are several accelerators, and stage 3 or what it leaves behind: its linear for torch's."""
    has_its_linear = torch.nn.functional.linear.__module__ == STAGE_3_LINEAR
    several = engine.device.type != "cpu" and torch.distributed.get_world_size() > 1
    return several and (engine.zero_optimization_stage() == 3 or has_its_linear)


def _of_offload(engine: Engine) -> Iterator[str]:
    """Yield what steps with another optimizer, or could not be resumed."""
    zero = engine._config.zero_config
    if engine.zenflow:
        yield "zero_optimization.zenflow: it updates some channels with an optimizer of its own. Remove that section"
    if engine.super_offload():
        yield "offload_optimizer.super_offload=true: it steps with its own CPU Adam instead. Set it to false"
    if (ratio := getattr(zero.offload_optimizer, "ratio", 1.0)) < 1.0:
        yield f"offload_optimizer.ratio={ratio}: part of the step is done by another Adam. Set it to 1.0"
    if getattr(zero.offload_optimizer, "device", None) == "nvme":
        yield (
            "offload_optimizer.device=nvme: after load_checkpoint() DeepSpeed continues without the optimizer's state, "
            "and with the first weights of every small sub-group. Use cpu"
        )
    if getattr(zero.offload_param, "device", None) == "nvme":
        yield "offload_param.device=nvme: DeepSpeed's load_checkpoint() fails on it, so no run could resume. Use cpu"
    if engine.zero_elastic_checkpoint():
        yield (
            "zero_optimization.elastic_checkpoint=true: DeepSpeed then saves the state without the param groups' "
            "options, and could not load it. Set it to false; ds-vrgd to-universal changes the number of ranks"
        )
    if engine.load_universal_checkpoint() and engine.zero_optimization_stage() == 0:
        yield (
            "checkpoint.load_universal=true with zero_optimization.stage=0: DeepSpeed would leave the weights as they "
            "are. Set it to false: without ZeRO a checkpoint loads as it is at any number of ranks"
        )


def _of_pipeline(engine: Engine) -> Iterator[str]:
    if not isinstance(engine, PipelineEngine):
        return
    if type(engine) is not PipelineEngine:
        yield f"{type(engine).__name__}: it follows a schedule of its own. Use deepspeed.PipelineModule"
    if (size := engine.sequence_parallel_size) > 1:
        yield f"PipelineModule with sequence_parallel_size={size}: not verified yet. Use either with data parallelism"
    if (clip := engine.gradient_clipping()) and engine.zero_optimization_stage() == 0 and not engine.bfloat16_enabled():
        yield (
            f"gradient_clipping={clip} with PipelineModule and zero_optimization.stage=0 in fp32: DeepSpeed clips by "
            "the norm of the first stage's gradients alone. Use stage 1, or set it to 0"
        )
    model, accumulation = engine.get_data_types()
    in_bf16_optimizer = _sums_bf16_in_fp32(engine) and not engine.zero_cpu_offload()
    if model != accumulation and not in_bf16_optimizer and tied_weights(engine.module):
        yield (
            f"data_types.grad_accum_dtype={engine._config.grad_accum_dtype} with TiedLayerSpec at stage 1: DeepSpeed "
            "leaves the stages' gradients of tied weights unsummed. Leave out grad_accum_dtype"
        )
    if engine.load_universal_checkpoint():
        yield (
            "checkpoint.load_universal=true with PipelineModule: ds-vrgd to-universal knows no stages. Set it to "
            "false: a checkpoint loads as it is at the same number of stages and ranks"
        )


def _of_tensor_parallelism(engine: Engine) -> Iterator[str]:
    group = tensor_parallel_group(engine)
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    if engine.mp_world_size != ranks and not isinstance(engine, PipelineEngine):
        yield (
            f"a model-parallel group of {engine.mp_world_size} ranks with {ranks} in the tensor-parallel group: "
            "pipeline parallelism without deepspeed's PipelineModule. Use that, or tensor and data parallelism alone"
        )
    if group is None:
        return
    # FP16_UnfusedOptimizer forms the norm of tensors that bear no mark: of the first tensor-parallel rank's alone.
    if engine.zero_optimization_stage() == 0 and engine.bfloat16_enabled():
        yield (
            "tensor parallelism with bf16.enabled=true and zero_optimization.stage=0: DeepSpeed's norm of the gradient "
            "leaves out the other ranks' parts of the split weights there. Use stage 1 or 2"
        )
    if engine.load_universal_checkpoint():
        yield (
            "checkpoint.load_universal=true with tensor parallelism: whole weights cannot be cut over the ranks yet. "
            "Set it to false: a checkpoint loads as it is at the number of ranks that saved it"
        )
    # Megatron sums the gradients of these over the ranks after the backward passes.
    if parts := [name for param, name in engine.param_names.items() if getattr(param, "sequence_parallel", False)]:
        yield (
            f"Megatron's sequence parallelism ({len(parts)} weights such as '{parts[0]}' are marked "
            "sequence_parallel): a rank's chunk gradients of these are parts that are added up later. Leave out "
            "--sequence-parallel"
        )
    peers = set(get_process_group_ranks(group)) - {torch.distributed.get_rank()}
    for param, name in engine.param_names.items():
        cut_over = getattr(param, "ds_process_group", None)  # all ranks, if there was no tensor-parallel group yet
        if cut_over is not None and not peers.isdisjoint(get_process_group_ranks(cut_over)):
            yield (
                f"'{name}' was cut over tensor-parallel ranks by deepspeed.zero.Init. Build the model without it, or "
                "give it data_parallel_group"
            )
            break


def _of_sequence_parallelism(engine: Engine) -> Iterator[str]:
    size, stage = engine.sequence_parallel_size, engine.zero_optimization_stage()
    asked = max(size, engine._config._param_dict.get("sequence_parallel_size", 1))  # by the JSON, or by an mpu
    if size <= 1 < asked:
        yield (
            f"sequence_parallel_size={asked} without an mpu: DeepSpeed takes every rank for a data-parallel one, and a "
            f"part of a sequence would count as a chunk. {_WITH_MPU.format(asked)}"
        )
    if size <= 1:
        return
    reduced_over = get_process_group_ranks(engine.seq_data_parallel_group)
    if not set(get_process_group_ranks(engine.seq_parallel_group)) <= set(reduced_over):
        yield (
            f"a sequence-parallel size of {size} by mesh_param, or by data_parallel_size and sequence_parallel_size in "
            "the JSON: DeepSpeed then reduces gradients over the data-parallel ranks alone, and the ranks that share a "
            f"sequence drift apart. {_WITH_MPU.format(asked)}, without the two in the JSON"
        )
    if stage == 1 and _sums_bf16_in_fp32(engine):
        yield (
            f"data_types.grad_accum_dtype=fp32 with bf16 at stage 1 and a sequence-parallel size of {size}: for the "
            "gradient norm BF16_Optimizer takes the ranks that share a sequence for tensor-parallel ones, and fails on "
            "all but the first. Leave out grad_accum_dtype (fused mode accumulates in fp32 anyway), or use stage 2"
        )
    if stage == 3 and not engine.zero_reduce_scatter():
        yield (
            f"zero_optimization.reduce_scatter=false at stage 3 with a sequence-parallel size of {size}: DeepSpeed "
            "divides what fits its bucket by the data-parallel ranks, and the rest by all ranks. Set it to true"
        )


def _of_experts(engine: Engine, optimizer: VROptimizer) -> Iterator[str]:
    if not engine.has_moe_layers:
        return
    reducing = [group["params"] for group in optimizer.param_groups if group["gamma"] < 1.0]
    if reducing and all(is_moe_param(param) for params in reducing for param in params):
        yield "gamma=1.0 for all but experts: the other layers' chunks are those that are counted. Use 0.999 for one"
    if (stage := engine.zero_optimization_stage()) not in (1, 2):
        yield f"MoE layers at zero_optimization.stage={stage}: not verified. Use stage 1 or 2"
    if engine.sequence_parallel_size > 1 or engine.mpu is not None:
        yield "MoE layers with an mpu (tensor, sequence or pipeline parallelism): not verified. Leave out the mpu"
    if engine.fp16_enabled():
        yield "MoE layers with fp16.enabled=true: not verified. Use bf16"
    if engine._config.zero_config.offload_optimizer is not None:
        yield "MoE layers with zero_optimization.offload_optimizer: not verified. Remove that section"
    if _sums_bf16_in_fp32(engine):
        yield "MoE layers with data_types.grad_accum_dtype=fp32 in bf16: not verified. Leave it out"
    if not all(EXPERT.fullmatch(name) for name, param in engine.module.named_parameters() if is_moe_param(param)):
        yield "experts that are not in a deepspeed.moe.layer.MoE (AutoEP): not verified. Use that layer"


def rounds_mean(engine: Engine) -> bool:
    """Return whether DeepSpeed rounds the mean of the gradients to 16 bits, whatever the step is taken with."""
    return any(_of_rounded_mean(engine))


def refuse_inexact(engine: Engine, optimizer: VROptimizer) -> None:
    """Raise for every setting of the engine that cannot be exact, all in one message.

    Raises:
        ValueError: each setting with its value, the reason and the way out.
    """
    reasons = itertools.chain(
        _of_optimizer(engine, optimizer), _of_precision(engine), _of_model(engine), _of_offload(engine),
        _of_pipeline(engine), _of_tensor_parallelism(engine), _of_sequence_parallelism(engine),
        _of_experts(engine, optimizer),
    )  # fmt: skip
    if listed := "".join(f"\n  - {reason}." for reason in reasons):
        raise ValueError(f"{type(optimizer).__name__} cannot be exact under this configuration:{listed}")


def refuse_overruled(named: Any, ours: Mapping[str, type[VROptimizer]], optimizer: torch.optim.Optimizer) -> None:
    """Raise if the JSON has ``named`` an optimizer of ours, and the program has given the engine one of another class.

    DeepSpeed takes the program's, and does not mention the JSON's. ``ours`` are by the names that a JSON may use.

    Raises:
        RuntimeError: naming both, and the way out.
    """
    # "LAMB" is DeepSpeed's name, too, in the JSON of a program that knows nothing of this package.
    if named in ours and named != "LAMB" and not isinstance(optimizer, ours[named]):
        other = type(optimizer).__name__
        raise RuntimeError(
            f'the DeepSpeed JSON\'s "optimizer" section names {named}, but the program has given the engine {other}, '
            f"and DeepSpeed would train with that. For {named}, call deepspeed.initialize without an optimizer, with "
            f"model_parameters=model.parameters(); for {other}, leave the section out."
        )


def refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer of ours was made for these parameters, and another one has come into the engine.

    Accelerate and the Hugging Face Trainer replace it silently: see the message.

    Raises:
        RuntimeError: naming both, and the way out for each of the known causes.
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


def guard_saving(engine: Engine) -> None:
    """Have a pipeline engine refuse to save and load where DeepSpeed would save one rank's part of the state alone.

    It does so without ZeRO in bf16, where it cuts the state over the ranks. A warning says so at once.
    """
    if engine.zero_optimization() or not isinstance(engine.optimizer, BF16_Optimizer):
        return
    reason = (
        "PipelineModule in bf16 with zero_optimization.stage=0: DeepSpeed cuts the optimizer's state over the "
        "data-parallel ranks, as at stage 1, but saves one rank's alone, and cannot load it. Use stage 1"
    )
    if engine.global_rank == 0:
        logger.warning(f"{reason}. Training continues, and saving a checkpoint will be an error.")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{reason}.")

    engine.save_checkpoint = engine.load_checkpoint = refuse
