"""Sequence parallelism (Ulysses): which ranks of an engine share their samples."""

from __future__ import annotations

from typing import Any

import torch

from ds_vrgd.moments import SequenceGroups

Engine = Any


def sequence_groups(engine: Engine) -> SequenceGroups | None:
    """The ranks that share samples, numbered as among those over which the engine reduces gradients. A collective.

    Returns:
        None where every rank has samples of its own.
    """
    if engine.sequence_parallel_size <= 1:
        return None
    number = {rank: place for place, rank in enumerate(_ranks(engine.seq_data_parallel_group))}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, tuple(_ranks(engine.seq_parallel_group)))
    size = engine.sequence_parallel_size
    divisor = size if engine.zero_optimization_stage() == 3 else 1
    members = sorted({tuple(number[rank] for rank in ranks) for ranks in everyone if ranks[0] in number})
    return SequenceGroups(engine.seq_parallel_group, tuple(members), divisor)


def refuse_sequences(engine: Engine) -> str | None:
    """Why sequence parallelism cannot be exact in this engine; None where it can, or where there is none."""
    size, told = engine.sequence_parallel_size, engine._config._param_dict.get("sequence_parallel_size", 1)
    way_out = (
        f"Call deepspeed.runtime.sequence_parallel.parallel_state_sp.initialize_sequence_parallel({max(size, told)}) "
        "and pass that module to deepspeed.initialize as mpu"
    )
    if size <= 1:
        if told <= 1:
            return None
        return (
            f"sequence_parallel_size={told} without an mpu: DeepSpeed takes every rank for a data-parallel one, and a "
            f"part of a sequence would count as a chunk. {way_out}"
        )
    if not set(_ranks(engine.seq_parallel_group)) <= set(_ranks(engine.seq_data_parallel_group)):
        return (
            f"a sequence-parallel size of {size} by mesh_param, or by data_parallel_size and sequence_parallel_size in "
            "the JSON: DeepSpeed then reduces gradients over the data-parallel ranks alone, and the ranks that share a "
            f"sequence drift apart. {way_out}, without the two in the JSON"
        )
    if engine.zero_optimization_stage() == 1 and engine.get_data_types() == (torch.bfloat16, torch.float32):
        return (
            f"data_types.grad_accum_dtype=fp32 with bf16 at stage 1 and a sequence-parallel size of {size}: in the "
            "gradient norm DeepSpeed's BF16_Optimizer takes the ranks that share a sequence for tensor-parallel ones, "
            "and fails on all but the first. Leave out grad_accum_dtype (fused mode accumulates in fp32 anyway), or "
            "use stage 2"
        )
    if engine.zero_optimization_stage() == 3 and not engine.zero_reduce_scatter():
        return (
            f"zero_optimization.reduce_scatter=false at stage 3 with a sequence-parallel size of {size}: DeepSpeed "
            "divides what fits its bucket by the number of data-parallel ranks, and the rest by that of all ranks. "
            "Set it to true"
        )
    return None


def _ranks(group: Any) -> list[int]:
    """Of the world, in the order of the group."""
    ranks: list[int] = torch.distributed.get_process_group_ranks(group)
    return ranks
