"""The elements of each layer that this rank owns, read from the bookkeeping of DeepSpeed's optimizer wrappers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_vrgd.engines.deepspeed.parallel import Engine, Layers
from ds_vrgd.moments import Route, Segment, ShardLayout

#: ``(rank, elements)`` of consecutive runs of a flattened parameter, by ascending rank.
Runs = tuple[tuple[int, int], ...]


@dataclass
class Holdings:
    """The contents of the client optimizer's tensors, of which layers are cut (``routes``) or whole (``copies``)."""

    layouts: dict[Tensor, ShardLayout] = field(default_factory=dict)  # of every tensor that step() will be called with
    group: Any | None = None  # process group over which the optimizer wrapper cuts the layers; None for whole ones
    routes: list[Route] = field(default_factory=list)  # where each observed parameter's elements are owned
    experts: dict[Any, list[Route]] = field(default_factory=dict)  # the same for experts, by the group that cuts them
    copies: dict[Tensor, Tensor] = field(default_factory=dict)  # the observed parameter that each tensor is a copy of


def holdings_of(engine: Engine, *, every_group: bool = False) -> Holdings:
    """Return what the optimizer wrapper of an engine, which is built, holds.

    With ``every_group`` it routes also the param groups whose gamma is 1, for their gradient alone.

    Raises:
        RuntimeError: the wrapper is not a known one.
    """
    wrapper, has_no_wrapper = engine.optimizer, engine.optimizer is engine.basic_optimizer
    groups = (wrapper if has_no_wrapper else wrapper.optimizer).param_groups
    observed = [every_group or group["gamma"] < 1.0 for group in groups]
    if has_no_wrapper:  # stage 0 in fp32: the optimizer has the model's own parameters
        params = [group["params"] for group in groups]
        return _whole(engine, observed, params, params)
    if type(wrapper) is FP16_UnfusedOptimizer:  # stage 0 in bf16: it has an fp32 copy of each parameter
        return _whole(engine, observed, wrapper.fp16_groups, wrapper.fp32_groups)
    if type(wrapper) is BF16_Optimizer:  # stage 1 in bf16 with fp32 accumulation: parameters end to end
        offsets = [[0, *itertools.accumulate(p.numel() for p in params)][:-1] for params in wrapper.bf16_groups]
        return _flat(engine, observed, wrapper.bf16_groups, offsets, wrapper.fp32_groups_flat_partition)
    if type(wrapper) is DeepSpeedZeroOptimizer:  # stages 1 and 2: perhaps with gaps between the parameters
        params, offsets = wrapper.round_robin_bit16_groups, wrapper.round_robin_bit16_offsets
        return _flat(engine, observed, params, offsets, wrapper.single_partition_of_fp32_groups)
    if type(wrapper) is DeepSpeedZeroOptimizer_Stage3:
        return _stage_3(engine, observed)
    raise RuntimeError(
        f"DeepSpeed built a {type(wrapper).__name__}, which ds_vrgd does not know, so no statistics would be right. "
        "Please report it with your DeepSpeed configuration."
    )


def wrapper_name(engine: Engine) -> str:
    """Return the name of DeepSpeed's class around the optimizer, also where it was re-classed; "none" without one."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return "none"
    return next(cls.__name__ for cls in type(wrapper).__mro__ if cls.__module__.startswith("deepspeed."))


def _whole(
    engine: Engine, observed: Sequence[bool], params: Sequence[Sequence[Tensor]], copies: Sequence[Sequence[Tensor]]
) -> Holdings:
    """Return the holdings where each of the optimizer's tensors is a whole parameter, or a copy of one."""
    held, layers = Holdings(), Layers(engine)
    for is_observed, of_group, copies_of_group in zip(observed, params, copies, strict=True):
        for param, copy in zip(of_group, copies_of_group, strict=True):
            held.layouts[copy] = ShardLayout.part(layers.of(param), param.numel())
            if is_observed and param.requires_grad:
                held.copies[copy] = param
    return held


def _flat(engine: Engine, observed: Sequence[bool], params: Any, offsets: Any, shards: Sequence[Tensor]) -> Holdings:
    """Return the holdings where a group's flat buffer is cut into one equal shard per rank, through its parameters.

    ``params``, in the order of the buffer, and ``offsets``, their first elements in it, have a list per param group.
    """
    wrapper, layers = engine.optimizer, Layers(engine)
    partitions = wrapper.real_dp_process_group  # a group of experts alone has a partition of its own
    held = Holdings(group=partitions[0] if isinstance(wrapper, BF16_Optimizer) else wrapper.dp_process_group)
    for of_group, begins, *rest in zip(params, offsets, shards, observed, partitions, strict=True):
        shard, is_observed, partition = rest
        rank, size = torch.distributed.get_rank(partition), shard.numel()
        parts = []
        for param, offset in zip(of_group, begins, strict=True):
            runs, start = runs_across(offset, param.numel(), size), max(offset - rank * size, 0)
            parts.append(Route(param, "", param.numel(), runs, shard, start))
        _add(held, layers, shard, parts, partition, is_observed=is_observed)
    return held


def runs_across(offset: int, numel: int, size: int) -> Runs:
    """Return the runs into which shards of ``size`` elements cut ``numel`` elements that begin at ``offset``."""
    last = offset + numel
    ranks = range(offset // size, (last - 1) // size + 1) if numel else ()
    return tuple((rank, min(last, (rank + 1) * size) - max(offset, rank * size)) for rank in ranks)


def _stage_3(engine: Engine, observed: Sequence[bool]) -> Holdings:
    """Return the holdings at stage 3, where the tail of a parameter's last slot is uninitialised memory."""
    wrapper, layers = engine.optimizer, Layers(engine)
    held = Holdings(group=wrapper.dp_process_group)
    ranks = torch.distributed.get_world_size(held.group)
    for number, (params, shard) in enumerate(
        zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    ):
        parts = []
        for param in params:
            _, start, slot = wrapper.grad_position[wrapper.get_param_id(param)]
            parts.append(Route(param, "", param.ds_numel, slots(param.ds_numel, slot, ranks), shard, start, slot))
        _add(held, layers, shard, parts, held.group, is_observed=observed[wrapper.sub_group_to_group_id[number]])
    return held


def _add(
    held: Holdings, layers: Layers, shard: Tensor, parts: Sequence[Route], partition: Any, *, is_observed: bool
) -> None:
    """Add a shard that has ``parts`` of parameters, not named yet, which the process group ``partition`` cuts."""
    rank, segments = torch.distributed.get_rank(partition), []
    of_shard = tuple(layers.of(part.param, partition) for part in parts)
    for index, (part, layer) in enumerate(zip(parts, of_shard, strict=True)):
        if own := dict(part.runs).get(rank, 0):
            before = sum(numel for other, numel in part.runs if other < rank)
            segments.append(Segment(index, part.shard_start, own, before))
        if is_observed:
            routes = held.routes if partition is held.group else held.experts.setdefault(partition, [])
            routes.append(replace(part, name=layer.name, place=len(routes)))
    held.layouts[shard] = ShardLayout(of_shard, tuple(segments), shard.numel())


def slots(numel: int, slot: int, ranks: int) -> Runs:
    """Return the runs of ``numel`` elements that are cut into equal slots over all ranks, without the empty ones."""
    filled = math.ceil(numel / slot) if slot else 0
    return tuple((rank, min(slot, numel - rank * slot)) for rank in range(min(filled, ranks)))
