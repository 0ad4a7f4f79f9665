"""The exchanges that a model's chunk gradients need, and the hooks or the reduction that feed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import (
    ChunkNorms,
    NodeGroups,
    ReplicatedMoments,
    Route,
    SeparateMoments,
    SequenceGroups,
    ShardedMoments,
    WithCopies,
)
from ds_vrgd.zero.fused import fuse
from ds_vrgd.zero.pipeline import cut_with_copies, tied_weights, whole_with_copies
from ds_vrgd.zero.wrappers import Holdings

Engine = Any
Cut = ShardedMoments | WithCopies | SeparateMoments
Whole = ReplicatedMoments | WithCopies

# Elements of an exchanged bucket: 64 MB in bf16, enough to fill a link, little beside DeepSpeed's own 1 GB.
LARGEST_BUCKET = 2**25


@dataclass(frozen=True)
class Exchanges:
    """What takes in the chunk gradients; both None with ``gamma=1``.

    Attributes:
        cut: of parameters that the ranks own in shards.
        whole: of parameters that every rank keeps whole.
    """

    cut: Cut | None
    whole: Whole | None


def build_exchanges(
    engine: Engine,
    holdings: Holdings,
    norms: ChunkNorms | None,
    *,
    fused: bool,
    ranks_per_node: int,
    sequences: SequenceGroups | None,
) -> Exchanges:
    """Build them, and connect them to the engine's parameters or to its reduction. Collective.

    Args:
        engine: the engine, built.
        holdings: what its optimizer wrapper holds.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        fused: replace the wrapper's reduction; else look on beside it, through hooks on the parameters.
        ranks_per_node: gradients travel among so many consecutive ranks, and only moments beyond them.
        sequences: which ranks share their samples; None where none do.
    """
    build = _Builder(engine, holdings, norms, sequences)
    cut = build.cut(ranks_per_node, fused=fused) if holdings.routes else None
    return Exchanges(cut, build.whole() if holdings.copies else None)


class _Builder:
    def __init__(
        self, engine: Engine, holdings: Holdings, norms: ChunkNorms | None, sequences: SequenceGroups | None
    ) -> None:
        self._engine = engine
        self._holdings = holdings
        self._norms = norms
        self._sequences = sequences
        self._bucket = min(int(engine.zero_reduce_bucket_size()), LARGEST_BUCKET)
        self._place = {param: index for index, param in enumerate(engine.param_names)}
        self._tied = {param: weights.group for weights in tied_weights(engine.module) for param in weights.params}

    def cut(self, ranks_per_node: int, *, fused: bool) -> Cut:
        """Of all parameters in shards, experts too."""
        held, group = self._holdings, self._holdings.group
        routes = self._in_order(held.routes)
        nodes = NodeGroups.build(group, ranks_per_node)

        def sharded(routes: Sequence[Route], norms: ChunkNorms | None) -> ShardedMoments:
            return ShardedMoments(routes, group, self._bucket, nodes=nodes, norms=norms, sequences=self._sequences)

        moments: ShardedMoments | WithCopies | None = None
        if fused:
            moments = exchange = sharded(routes, self._norms)
            fuse(self._engine.optimizer, exchange, held.layouts)
        else:
            if self._tied:
                rank = torch.distributed.get_rank(group)
                moments = cut_with_copies(routes, rank, self._tied, sharded, self._norms)
            moments = moments or sharded(routes, self._norms)
            _hook([route.param for route in routes], moments)
        return self._with_experts(moments) if held.experts and isinstance(moments, ShardedMoments) else moments

    def whole(self) -> Whole:
        """Of all parameters that every rank keeps whole."""
        params = list(self._holdings.copies.values())

        def replicated(params: Sequence[Tensor], norms: ChunkNorms | None) -> ReplicatedMoments:
            group = self._engine.seq_data_parallel_group
            return ReplicatedMoments(params, group, norms=norms, sequences=self._sequences)

        moments = (
            whole_with_copies(params, self._tied, replicated, self._norms)
            if self._tied
            else replicated(params, self._norms)
        )
        _hook(params, moments)
        return moments

    def _with_experts(self, shared: ShardedMoments) -> SeparateMoments:
        """Beside ``shared``, the exchanges of experts over the ranks that hold the same ones.

        DeepSpeed divides their sum by the number of all data-parallel ranks: an expert's gradient is a sum over its
        expert-parallel ranks' micro-batches already.
        """
        held = self._holdings
        parts: list[tuple[ShardedMoments, set[Tensor]]] = [(shared, set())]
        for group, of_group in held.experts.items():
            routes = self._in_order(of_group)
            alone = tuple((rank,) for rank in range(torch.distributed.get_world_size(group)))
            mean = SequenceGroups(group, alone, held.layouts[routes[0].shard].share)
            exchange = ShardedMoments(routes, group, self._bucket, norms=self._norms, sequences=mean, eager=False)
            _hook([route.param for route in routes], exchange)
            parts.append((exchange, {route.shard for route in routes}))
        return SeparateMoments(parts)

    def _in_order(self, routes: Sequence[Route]) -> list[Route]:
        # Backward goes through the model about in the reverse of its order, whatever the param groups are.
        return sorted(routes, key=lambda route: self._place[route.param], reverse=True)


def _hook(params: Sequence[Tensor], moments: ReplicatedMoments | ShardedMoments | WithCopies) -> None:
    for param in params:
        # A tensor hook sees the gradient of one micro-batch, before DeepSpeed's own hooks reduce it.
        param.register_hook(lambda grad, param=param: moments.add(param, grad))
