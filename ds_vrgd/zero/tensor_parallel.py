"""Tensor parallelism: what could not be exact under it, and weights that look split but are not marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE
from ds_vrgd.zero.groups import is_split, numel_of, tensor_parallel_group

Engine = Any


def _without_zero(engine: Engine) -> str | None:
    """FP16_UnfusedOptimizer forms the norm of tensors that bear no mark: of the first tensor-parallel rank's alone."""
    if (
        tensor_parallel_group(engine) is not None
        and engine.zero_optimization_stage() == 0
        and engine.bfloat16_enabled()
    ):
        return (
            "tensor parallelism with bf16.enabled=true and zero_optimization.stage=0: DeepSpeed's norm of the gradient "
            "leaves out the other ranks' parts of the split weights there. Use stage 1 or 2"
        )
    return None


def _universal(engine: Engine) -> str | None:
    if tensor_parallel_group(engine) is not None and engine.load_universal_checkpoint():
        return (
            "checkpoint.load_universal=true with tensor parallelism: whole weights cannot be cut over the ranks yet. "
            "Set it to false: a checkpoint loads as it is at the number of ranks that saved it"
        )
    return None


def _megatron_sequence_parallel(engine: Engine) -> str | None:
    """Megatron adds the tensor-parallel ranks' parts of these gradients when the backward passes are over."""
    partial = [name for param, name in engine.param_names.items() if getattr(param, "sequence_parallel", False)]
    if tensor_parallel_group(engine) is not None and partial:
        return (
            f"Megatron's sequence parallelism ({len(partial)} weights such as '{partial[0]}' are marked "
            "sequence_parallel): a rank's chunk gradients of these are parts that are added up later. Leave out "
            "--sequence-parallel"
        )
    return None


def _partitioned_over_copies(engine: Engine) -> str | None:
    """zero.Init before there was a tensor-parallel group cuts every weight over all ranks, whatever they hold."""
    group = tensor_parallel_group(engine)
    if group is None:
        return None
    peers = set(torch.distributed.get_process_group_ranks(group))
    for param, name in engine.param_names.items():
        cut_over = getattr(param, "ds_process_group", None)
        if cut_over is not None and peers & set(torch.distributed.get_process_group_ranks(cut_over)) != {
            torch.distributed.get_rank()
        }:
            return (
                f"'{name}' was cut over tensor-parallel ranks by deepspeed.zero.Init. Build the model without it, or "
                "give it data_parallel_group"
            )
    return None


#: For ``ds_vrgd.zero.refusals``.
TENSOR_PARALLEL: tuple[Callable[[Engine], str | None], ...] = (
    _without_zero,
    _universal,
    _megatron_sequence_parallel,
    _partitioned_over_copies,
)


def unmarked_splits(engine: Engine) -> list[str]:
    """Names of trained weights that differ between tensor-parallel ranks, and are not marked. A collective of these.

    A weight that is no part of a larger one is the same on all of them: Megatron and AutoTP start them so, and the same
    gradients keep them so.
    """
    group = tensor_parallel_group(engine)
    if group is None:
        return []
    found = [(name, param) for param, name in engine.param_names.items() if param.requires_grad and not is_split(param)]
    if not found:
        return []
    marks = torch.stack([_marks(param) for _, param in found]).to(engine.device).nan_to_num_()
    extremes = torch.stack([marks, -marks])
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=group)
    differ = (extremes[0] + extremes[1]).ne(0).any(1).tolist()
    return [name for (name, _), differs in zip(found, differ, strict=True) if differs]


def _marks(param: Tensor) -> Tensor:
    """``(3,)``: what tells two weights apart."""
    values = getattr(param, "ds_tensor", param).detach()
    sums = [values.sum(dtype=SUM_DTYPE), values.abs().sum(dtype=SUM_DTYPE)]
    return torch.stack([*sums, sums[0].new_tensor(float(numel_of(param)))])
