"""The ranks that sum for a whole layer, that hold the same weights or samples, and that share a node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import Tensor
from torch.distributed import get_process_group_ranks

from ds_vrgd.moments import SUM_DTYPE, Layer, SequenceGroups, gathered

Engine = Any

#: The name of an expert's parameter in DeepSpeed's MoE layer: what precedes the expert's number, the number, the rest.
EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


def tensor_parallel_group(engine: Engine) -> Any | None:
    """Return the process group over which split weights are cut; None without tensor parallelism.

    Works while the engine is being built, too. DeepSpeed's module for sequence parallelism is an mpu as well, of ranks
    that all hold the same weights.
    """
    mpu = engine.mpu
    group = None if hasattr(mpu, "initialize_sequence_parallel") else bwc_tensor_model_parallel_group(mpu)
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def replicas_of(engine: Engine) -> list[int] | None:
    """Return the global ranks that hold the same parameters as this one, or None for all; also in an unbuilt engine."""
    mpu = engine.mpu
    if mpu is None:
        return None
    sequences = getattr(mpu, "get_sequence_data_parallel_group", None)
    return list(get_process_group_ranks(mpu.get_data_parallel_group() if sequences is None else sequences()))


def chunk_ranks(engine: Engine) -> int:
    """Return how many ranks, or groups of ranks that share their sequences, compute chunks of their own."""
    if engine.dp_world_size is not None:
        return int(engine.dp_world_size)
    # DeepSpeed's own mpu of sequence parallelism does not know it.
    return torch.distributed.get_world_size(engine.seq_data_parallel_group) // int(engine.sequence_parallel_size)


def sequence_groups(engine: Engine) -> SequenceGroups | None:
    """Return the ranks that share samples (Ulysses), numbered among those over which the engine reduces; None without.

    A collective.
    """
    size = engine.sequence_parallel_size
    if size <= 1:
        return None
    number = {rank: index for index, rank in enumerate(get_process_group_ranks(engine.seq_data_parallel_group))}
    everyone = gathered(get_process_group_ranks(engine.seq_parallel_group), torch.distributed.group.WORLD)
    divisor = size if engine.zero_optimization_stage() == 3 else 1
    members = sorted({tuple(number[rank] for rank in ranks) for ranks in everyone if ranks[0] in number})
    return SequenceGroups(engine.seq_parallel_group, tuple(members), divisor)


def ranks_per_node(
    wanted: int | None, device: torch.device, group: Any, together: Iterable[tuple[int, ...]] = ()
) -> int:
    """Return how many data-parallel ranks share a node. A collective of all ranks.

    Args:
        wanted: the optimizer's argument; None for LOCAL_WORLD_SIZE (torchrun) or LOCAL_SIZE (DeepSpeed's launcher).
        device: where the ranks can communicate.
        group: process group of the data-parallel ranks; only some of a node's ranks where the model is cut, too.
        together: numbers in ``group`` of ranks that share their chunks, and so must be on one node.

    Returns:
        ``wanted`` if it is given. The size of ``group``, so that there is one level, where the launcher reports
        nothing, where the nodes are not equal, or where they would part ranks that must be together.

    Raises:
        ValueError: ``wanted`` differs between the ranks.
    """
    world, size = torch.distributed.get_world_size(), torch.distributed.get_world_size(group)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
    nodes = [rank // local for rank in get_process_group_ranks(group)]
    own = nodes.count(nodes[0])
    in_a_row = world % local == 0 and nodes == sorted(nodes) and {nodes.count(node) for node in nodes} == {own}
    whole = all(len({number // own for number in ranks}) == 1 for ranks in together)
    here = wanted or (own if in_a_row and whole else size)
    extremes = torch.tensor([here, -here], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    most, minus_least = extremes.tolist()
    if most == -minus_least:
        return here
    if wanted:
        raise ValueError(
            f"ranks_per_node is {-minus_least} on one rank and {most} on another. Give every rank the same value"
        )
    return size


def numel_of(param: Tensor) -> int:
    """Return a parameter's elements on the ranks over which ZeRO cuts it together."""
    return int(getattr(param, "ds_numel", param.numel()))


def unmarked_splits(engine: Engine) -> list[str]:
    """Return the names of trained weights that differ between tensor-parallel ranks without a mark. A collective.

    A weight that is no part of a larger one is the same on all of these ranks: Megatron and AutoTP start it so, and
    equal gradients keep it so. They mark split weights.
    """
    group = tensor_parallel_group(engine)
    of_all = engine.param_names.items()
    params = {name: p for p, name in of_all if p.requires_grad and not is_model_parallel_parameter(p)}
    if group is None or not params:
        return []
    marks = torch.stack([_fingerprint(param) for param in params.values()]).to(engine.device).nan_to_num_()
    extremes = torch.stack([marks, -marks])
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=group)
    differ = (extremes[0] + extremes[1]).ne(0).any(1).tolist()
    return [name for name, differs in zip(params, differ, strict=True) if differs]


def _fingerprint(param: Tensor) -> Tensor:
    """Return ``(3,)`` numbers that distinguish two weights: sum, sum of magnitudes, elements."""
    values = getattr(param, "ds_tensor", param).detach()
    sums = [values.sum(dtype=SUM_DTYPE), values.abs().sum(dtype=SUM_DTYPE)]
    return torch.stack([*sums, sums[0].new_tensor(float(numel_of(param)))])


def expert_names(names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Return the names of this rank's experts with the number over all ranks, as in DeepSpeed's checkpoints.

    Each rank counts its own experts from 0 in ``names``, those of all parameters.
    """
    found = {param: match for param, name in names.items() if is_moe_param(param) and (match := EXPERT.fullmatch(name))}
    local: dict[str, int] = {}
    for match in found.values():
        local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    numbered = {}
    for param, match in found.items():
        first = groups._get_expert_parallel_rank(getattr(param, "group_name", None)) * local[match[1]]
        numbered[param] = f"{match[1]}{first + int(match[2])}{match[3]}"
    return numbered


class Layers:
    """Makes the layers of an engine's parameters. Constructing it is a collective of the tensor-parallel ranks."""

    def __init__(self, engine: Engine) -> None:
        self._names = engine.param_names | expert_names(engine.param_names)
        self._group = group = tensor_parallel_group(engine)
        self._is_first = group is None or torch.distributed.get_rank(group) == 0
        split = [param for param in self._names if group is not None and is_model_parallel_parameter(param)]
        numels = torch.tensor([numel_of(param) for param in split], device=engine.device)
        if split:
            torch.distributed.all_reduce(numels, group=group)
        self._split: dict[Tensor, int] = dict(zip(split, numels.tolist(), strict=True))

    def of(self, param: Tensor, partition: Any | None = None) -> Layer:
        """Return the logical tensor that ``param`` is, or is a part of.

        ``partition`` is the process group over which the optimizer wrapper cuts it; None where it keeps it whole.
        """
        cut_over = (partition, self._group if param in self._split else None)
        # DeepSpeed's rule: split weights count on every tensor-parallel rank, copies on the first alone.
        counted = (self._is_first or param in self._split) and not getattr(param, PIPE_REPLICATED, False)
        # An expert's gradient has seen the tokens of all its expert-parallel ranks.
        expert_group = getattr(param, "group_name", None)
        share = groups._get_expert_parallel_world_size(expert_group) if is_moe_param(param) else 1
        name, numel = self._names.get(param, "unnamed"), self._split.get(param, numel_of(param))
        return Layer(name, numel, tuple(group for group in cut_over if group is not None), counted, int(share))
