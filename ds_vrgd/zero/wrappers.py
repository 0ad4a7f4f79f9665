"""Where each of DeepSpeed's optimizer wrappers keeps which element of which parameter.

One function a wrapper; each reads DeepSpeed's own bookkeeping and turns it into layouts and routes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_vrgd.moments import Route, Segment, ShardLayout
from ds_vrgd.zero.compat import end_to_end, flat_offsets
from ds_vrgd.zero.groups import Layers

Engine = Any
Choice = Callable[[dict[str, Any]], bool]


@dataclass
class Holdings:
    """What the client optimizer's tensors hold.

    Attributes:
        layouts: of every tensor that ``step()`` will be called with.
        group: process group over which the optimizer wrapper cuts the layers; None where it keeps them whole.
        routes: for cut layers, where each observed parameter's elements are owned.
        experts: the same for experts, which their own groups cut, by group.
        copies: for whole layers, the observed parameter behind each optimizer tensor.
    """

    layouts: dict[Tensor, ShardLayout] = field(default_factory=dict)
    group: Any | None = None
    routes: list[Route] = field(default_factory=list)
    experts: dict[Any, list[Route]] = field(default_factory=dict)
    copies: dict[Tensor, Tensor] = field(default_factory=dict)


def holdings_of(engine: Engine, *, every_group: bool = False) -> Holdings:
    """Read the engine's optimizer wrapper.

    Args:
        engine: the engine, built.
        every_group: route also the param groups whose gamma is 1, for their gradient alone.

    Raises:
        RuntimeError: the wrapper is none that is known.
    """
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return _unwrapped(engine)
    readers: dict[type, Callable[[Engine, Choice], Holdings]] = {
        FP16_UnfusedOptimizer: _unfused,
        BF16_Optimizer: _bf16,
        DeepSpeedZeroOptimizer: _stages_1_and_2,
        DeepSpeedZeroOptimizer_Stage3: _stage_3,
    }
    if type(wrapper) not in readers:
        raise RuntimeError(
            f"DeepSpeed built a {type(wrapper).__name__}, which ds_vrgd does not know, so no statistics would be "
            "right. Please report it with your DeepSpeed configuration."
        )
    return readers[type(wrapper)](engine, (lambda group: True) if every_group else _observed)


def wrapper_name(engine: Engine) -> str:
    """DeepSpeed's class around the optimizer, also where it was re-classed; "none" if there is none."""
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        return "none"
    return next(cls.__name__ for cls in type(wrapper).__mro__ if cls.__module__.startswith("deepspeed."))


def _observed(group: dict[str, Any]) -> bool:
    return bool(group["gamma"] < 1.0)


def _unwrapped(engine: Engine) -> Holdings:
    """Stage 0 in fp32: the optimizer has the model's own parameters."""
    held, layers = Holdings(), Layers(engine)
    for group in engine.basic_optimizer.param_groups:
        for param in group["params"]:
            held.layouts[param] = ShardLayout.part(layers.of(param), param.numel())
            if _observed(group) and param.requires_grad:
                held.copies[param] = param
    return held


def _unfused(engine: Engine, chosen: Choice) -> Holdings:
    """Stage 0 in bf16: the optimizer has an fp32 copy of each parameter."""
    held, layers, wrapper = Holdings(), Layers(engine), engine.optimizer
    groups = zip(wrapper.optimizer.param_groups, wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
    for group, params, copies in groups:
        for param, copy in zip(params, copies, strict=True):
            held.layouts[copy] = ShardLayout.part(layers.of(param), param.numel())
            if chosen(group):
                held.copies[copy] = param
    return held


def _bf16(engine: Engine, chosen: Choice) -> Holdings:
    """Stage 1 in bf16 with fp32 accumulation: parameters end to end in one flat buffer a group."""
    wrapper, layers = engine.optimizer, Layers(engine)
    held = Holdings(group=wrapper.real_dp_process_group[0])
    groups = zip(
        wrapper.optimizer.param_groups,
        wrapper.bf16_groups,
        wrapper.fp32_groups_flat_partition,
        wrapper.real_dp_process_group,
        strict=True,
    )
    for group, params, shard, partition in groups:
        _add_flat_group(held, layers, partition, chosen(group), params, end_to_end(params), shard)
    return held


def _stages_1_and_2(engine: Engine, chosen: Choice) -> Holdings:
    """Stages 1 and 2: parameters in the order of ``round_robin_bit16_groups``, perhaps with gaps between them."""
    wrapper, layers = engine.optimizer, Layers(engine)
    held = Holdings(group=wrapper.dp_process_group)
    groups = zip(
        wrapper.optimizer.param_groups,
        wrapper.round_robin_bit16_groups,
        flat_offsets(wrapper),
        wrapper.single_partition_of_fp32_groups,
        wrapper.real_dp_process_group,
        strict=True,
    )
    for group, params, offsets, shard, partition in groups:
        _add_flat_group(held, layers, partition, chosen(group), params, offsets, shard)
    return held


def _add_flat_group(
    held: Holdings,
    layers: Layers,
    partition: Any,
    routed: bool,
    params: Sequence[Tensor],
    offsets: Sequence[int],
    shard: Tensor,
) -> None:
    """A flat buffer that is cut into one equal shard a rank, without regard for the parameters in it."""
    rank, size = torch.distributed.get_rank(partition), shard.numel()
    of_shard = tuple(layers.of(param, partition) for param in params)
    segments = []
    for index, (param, offset) in enumerate(zip(params, offsets, strict=True)):
        begin, end = max(offset, rank * size), min(offset + param.numel(), (rank + 1) * size)
        if begin < end:
            segments.append(Segment(index, begin - rank * size, end - begin, begin - offset))
        if routed:
            name = of_shard[index].name
            routes = held.routes if partition is held.group else held.experts.setdefault(partition, [])
            runs, place = _runs_across(offset, param.numel(), size), len(routes)
            routes.append(Route(param, name, param.numel(), runs, shard, begin - rank * size, place=place))
    held.layouts[shard] = ShardLayout(of_shard, tuple(segments), size)


def _runs_across(offset: int, numel: int, size: int) -> tuple[tuple[int, int], ...]:
    """``(rank, elements)`` of the pieces into which shards of ``size`` cut ``numel`` elements from ``offset`` on."""
    runs, position = [], offset
    while position < offset + numel:
        rank = position // size
        end = min(offset + numel, (rank + 1) * size)
        runs.append((rank, end - position))
        position = end
    return tuple(runs)


def _stage_3(engine: Engine, chosen: Choice) -> Holdings:
    """Stage 3: every parameter cut into equal slots over all ranks; the tail of the last is uninitialised memory."""
    wrapper, layers = engine.optimizer, Layers(engine)
    held = Holdings(group=wrapper.dp_process_group)
    rank, ranks = torch.distributed.get_rank(held.group), torch.distributed.get_world_size(held.group)
    for sub_group, (params, shard) in enumerate(
        zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat, strict=True)
    ):
        group = wrapper.optimizer.param_groups[wrapper.sub_group_to_group_id[sub_group]]
        segments = []
        for index, param in enumerate(params):
            _, start, slot = wrapper.grad_position[wrapper.get_param_id(param)]
            runs = _slots(param.ds_numel, slot, ranks)
            own = dict(runs).get(rank, 0)
            if own:
                segments.append(Segment(index, start, own, rank * slot))
            if chosen(group):
                name, place = engine.param_names[param], len(held.routes)
                held.routes.append(Route(param, name, param.ds_numel, runs, shard, start, slot=slot, place=place))
        of_shard = tuple(layers.of(param, held.group) for param in params)
        held.layouts[shard] = ShardLayout(of_shard, tuple(segments), shard.numel())
    return held


def _slots(numel: int, slot: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """``(rank, elements)`` of the slots that hold anything."""
    filled = math.ceil(numel / slot) if slot else 0
    return tuple((rank, min(slot, numel - rank * slot)) for rank in range(min(filled, ranks)))
