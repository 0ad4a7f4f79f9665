"""The exchange of a model's chunk gradients, and the parameters whose hooks feed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_vrgd.engines.deepspeed.fused import fuse
from ds_vrgd.engines.deepspeed.parallel import Engine, ranks_per_node, sequence_groups
from ds_vrgd.engines.deepspeed.pipeline import tied_weights
from ds_vrgd.engines.deepspeed.wrappers import Holdings
from ds_vrgd.moments import (
    ChunkNorms,
    CombinedMoments,
    CopiedMoments,
    Exchange,
    NodeGroups,
    ReplicatedMoments,
    Route,
    SequenceGroups,
    ShardedMoments,
)

# Elements of an exchanged bucket: 64 MB in bf16, enough to fill a link, and little next to DeepSpeed's own 1 GB.
LARGEST_BUCKET = 2**25


class Built(NamedTuple):
    """The exchange that takes the chunk gradients of an engine, and the parameters that feed it."""

    exchange: Exchange | None  # of all observed parameters; None where none is observed (gamma=1)
    hooked: Sequence[Tensor] = ()  # parameters that DeepSpeed reduces itself, whose gradients are seen through hooks
    copied: Mapping[Tensor, CopiedMoments] = {}  # of weights that other stages of a pipeline hold copies of


def build_exchange(
    engine: Engine,
    holdings: Holdings,
    norms: ChunkNorms | None,
    *,
    fused: bool,
    variance: bool = True,
    compares: bool = False,
) -> Built:
    """Build the exchange, and replace the engine's reduction by it with ``fused``. A collective.

    Args:
        engine, holdings: the engine, built, and what its optimizer wrapper holds.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        fused: replace the wrapper's reduction; else observe it, through hooks on the parameters.
        variance: whether any group reduces variance; else the mean alone is exchanged.
        compares: whether the ranks are compared, with ``fused``.
    """
    if not (holdings.copies or holdings.routes):
        return Built(None)
    sequences = sequence_groups(engine)
    tied = {param: weights.group for weights in tied_weights(engine.module) for param in weights.params}
    if holdings.copies:
        return _whole(engine, list(holdings.copies.values()), norms, tied, sequences)
    group, bucket = holdings.group, min(int(engine.zero_reduce_bucket_size()), LARGEST_BUCKET)
    together = () if sequences is None else sequences.members
    near = ranks_per_node(engine.basic_optimizer.ranks_per_node, engine.device, group, together)
    nodes = NodeGroups.build(group, near)
    routes = _in_order(engine, holdings.routes)
    params = [route.param for route in routes]

    def sharded(routes: Sequence[Route], norms: ChunkNorms | None) -> ShardedMoments:
        return ShardedMoments(
            routes, group, bucket, nodes=nodes, norms=norms, sequences=sequences, variance=variance, compares=compares
        )

    if tied:
        copied: dict[Tensor, CopiedMoments] = {}
        runs: list[tuple[Tensor, int, Exchange, Tensor]] = []
        for route in (route for route in routes if route.param in tied):
            # Stands for a shard of this weight's elements alone, and has no memory.
            numel = dict(route.runs).get(torch.distributed.get_rank(group), 0)
            key = torch.zeros((), device=route.shard.device).expand(numel)
            # The copies' parts are summed in fp32, and so the sums travel.
            wire = torch.promote_types(route.param.dtype, torch.float32)
            alone = sharded([replace(route, shard=key, shard_start=0, dtype=wire)], None)
            copied[route.param] = CopiedMoments(route.param, tied[route.param], alone, norms)
            runs.append((route.shard, route.shard_start, copied[route.param], key))
        rest = [route for route in routes if route.param not in tied]
        return Built(CombinedMoments(sharded(rest, norms) if rest else None, copied, {}, runs), params, copied)
    shared = sharded(routes, norms)
    if fused:  # neither with a pipeline nor with experts
        fuse(engine.optimizer, shared, holdings.layouts, measures=variance)
        return Built(shared)
    if not holdings.experts:
        return Built(shared, params)
    # DeepSpeed divides the experts' sum by the number of all data-parallel ranks: an expert's gradient is a sum over
    # its expert-parallel ranks' micro-batches already.
    own: dict[Tensor, Exchange] = {}
    tensors: dict[Tensor, Exchange] = {}
    for of_experts, its_routes in holdings.experts.items():
        routes = _in_order(engine, its_routes)
        alone_each = tuple((rank,) for rank in range(torch.distributed.get_world_size(of_experts)))
        mean = SequenceGroups(of_experts, alone_each, holdings.layouts[routes[0].shard].share)
        experts = ShardedMoments(routes, of_experts, bucket, norms=norms, sequences=mean, eager=False)
        own |= {route.param: experts for route in routes}
        tensors |= {route.shard: experts for route in routes}
    return Built(CombinedMoments(shared, own, tensors), [*params, *own])


def _whole(
    engine: Engine, params: Sequence[Tensor], norms: ChunkNorms | None, tied: Mapping[Tensor, Any],
    sequences: SequenceGroups | None,
) -> Built:  # fmt: skip
    """Build the exchange of parameters that every data-parallel rank holds whole."""
    group = engine.seq_data_parallel_group
    rest = [param for param in params if param not in tied]

    def replicated(params: Sequence[Tensor], norms: ChunkNorms | None) -> ReplicatedMoments:
        return ReplicatedMoments(params, group, norms=norms, sequences=sequences, counts_all=True)

    exchange = replicated(rest, norms) if rest else None
    copied = {
        param: CopiedMoments(param, tied[param], replicated([param], None), norms) for param in params if param in tied
    }
    return Built(CombinedMoments(exchange, copied, copied), params, copied) if copied else Built(exchange, params)


def _in_order(engine: Engine, routes: Sequence[Route]) -> list[Route]:
    """Return the routes as backward goes through the model: about in the reverse of its order, whatever the groups."""
    index = {param: number for number, param in enumerate(engine.param_names)}
    return sorted(routes, key=lambda route: index[route.param], reverse=True)
