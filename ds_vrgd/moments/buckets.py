"""Buckets: gradients that travel together, and their places in the buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.route import Plan, Route

# NCCL copies what begins at an odd address up to twice as slowly: regions are padded to 128 bytes in half precision.
ALIGNMENT = 64

# Among more peers, a parameter's equal slots are copied as one strided block rather than one by one.
FEW_PEERS = 16


@dataclass(frozen=True)
class _Block:
    """``rows x columns`` consecutive elements of a gradient and their place in the send buffer."""

    rows: int
    columns: int
    target: int
    row_stride: int

    def view(self, data: Tensor) -> Tensor:
        """The place in ``data``: ``(columns,)`` for a single row, else ``(rows, columns)``."""
        if self.rows == 1:
            return data[self.target : self.target + self.columns]
        return data.as_strided((self.rows, self.columns), (self.row_stride, 1), data.storage_offset() + self.target)


@dataclass(frozen=True)
class Piece:
    """Neighbours in this rank's region of a bucket that are neighbours in a shard, too."""

    start: int
    numel: int
    shard: Tensor
    shard_start: int


class Bucket:
    """Parameters whose gradients travel together.

    In a send buffer, the ranks' regions stand in the order of the plan, so that what a peer is sent is in one piece.
    In a region, parameters stand in the order of their places in the shards, and padding stands at its end.

    Attributes:
        routes: in the order in which the gradients are expected.
        regions: elements that each data-parallel rank owns, and padding.
        splits: elements that each peer is sent.
        pieces: this rank's region, cut where its places in the shards are no neighbours.
    """

    def __init__(self, routes: Sequence[Route], plan: Plan) -> None:
        self.routes = tuple(routes)
        self.dtype, self.device = routes[0].param.dtype, routes[0].param.device
        reserved = {route.param: route.reserved(plan.ranks) for route in routes}
        owned = [sum(column) for column in zip(*reserved.values(), strict=True)]
        self.regions = [-(-numel // ALIGNMENT) * ALIGNMENT for numel in owned]
        in_order = [self.regions[rank] for rank in plan.order]
        bases = dict(zip(plan.order, itertools.accumulate(in_order, initial=0), strict=False))
        self.numel = sum(in_order)
        self.splits = [sum(in_order[i : i + plan.share]) for i in range(0, plan.ranks, plan.share)]
        self.own = self.splits[plan.me]
        self._blocks: dict[Tensor, tuple[_Block, ...]] = {}
        paddings = [(bases[rank] + own, self.regions[rank] - own) for rank, own in enumerate(owned)]
        self._tails = [(start, numel) for start, numel in paddings if numel]
        self.pieces: list[Piece] = []
        within = [0] * plan.ranks
        for route in sorted(routes, key=lambda route: route.place):
            starts = [bases[rank] + offset for rank, offset in enumerate(within)]
            self._blocks[route.param] = tuple(self._cut(route, starts, plan))
            self._add_piece(route, within[plan.rank], reserved[route.param][plan.rank])
            runs = dict(route.runs)
            for rank, width in enumerate(reserved[route.param]):
                held = runs.get(rank, 0)
                if held < width:
                    self._tails.append((starts[rank] + held, width - held))
                within[rank] += width

    def _cut(self, route: Route, starts: Sequence[int], plan: Plan) -> Iterable[_Block]:
        """Cut a gradient into as few copies as there are: one a rank, or one for the equal slots of many peers."""
        full, rest = 0, route.runs
        if route.slot and plan.peers > FEW_PEERS and len(set(self.regions)) == 1:
            full = route.numel // route.slot
            rest = route.runs[full:]
        for first in range(0, full, plan.peers):
            rows = min(plan.peers, full - first)
            yield _Block(rows, route.slot or 0, starts[first], plan.share * self.regions[0])
        for rank, numel in rest:
            if numel:
                yield _Block(1, numel, starts[rank], numel)

    def _add_piece(self, route: Route, start: int, numel: int) -> None:
        if numel == 0:
            return
        last = self.pieces[-1] if self.pieces else None
        if last and last.shard is route.shard and last.shard_start + last.numel == route.shard_start:
            self.pieces[-1] = Piece(last.start, last.numel + numel, last.shard, last.shard_start)
        else:
            self.pieces.append(Piece(start, numel, route.shard, route.shard_start))

    def views(self, data: Tensor) -> Views:
        """The bucket's places in a buffer."""
        places = {
            param: _Places([block.view(data) for block in blocks], [block.rows * block.columns for block in blocks])
            for param, blocks in self._blocks.items()
        }
        return Views(places, [data[start : start + numel] for start, numel in self._tails])


@dataclass(frozen=True)
class _Places:
    """Of one gradient: views of a buffer, and how many elements go to each."""

    views: list[Tensor]
    sizes: list[int]


@dataclass(frozen=True)
class Views:
    """Of a buffer, as a bucket uses it.

    Attributes:
        places: of each parameter's gradient.
        tails: what slots and regions reserve and nothing fills.
    """

    places: dict[Tensor, _Places]
    tails: list[Tensor]

    def copy(self, grads: Mapping[Tensor, Tensor], accumulate: bool = False) -> None:
        """Write gradients (or add them) to their places, together; of any shape and strides."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param, grad in grads.items():
            places = self.places[param]
            if not places.views:
                continue
            if len(places.views) == 1 and places.views[0].dim() == 1 and grad.is_contiguous():
                targets.append(places.views[0])
                sources.append(grad.view(-1))
                continue
            for view, part in zip(places.views, grad.reshape(-1).split_with_sizes(places.sizes), strict=True):
                if view.dim() == 1:
                    targets.append(view)
                    sources.append(part)
                else:
                    part = part.view(view.shape)
                    view.add_(part) if accumulate else view.copy_(part)
        if targets:
            torch._foreach_add_(targets, sources) if accumulate else torch._foreach_copy_(targets, sources)

    def clear(self, params: Iterable[Tensor], tails: bool) -> None:
        """Write zeros for gradients that never came and, with ``tails``, where none belongs."""
        views = [view for param in params for view in self.places[param].views]
        views += self.tails if tails else []
        if views:
            torch._foreach_zero_(views)


@dataclass(eq=False)
class Buffer:
    """Memory that buckets take turns in.

    Attributes:
        data: one-dimensional.
        free: the event after which it may be written again.
        prepared: its views, by the bucket that uses them.
        last: the bucket that used it last, whose tails are zero.
    """

    data: Tensor
    free: Any = None
    prepared: dict[Bucket, Views] = field(default_factory=dict)
    last: Bucket | None = None

    def views(self, bucket: Bucket) -> Views:
        """Of ``bucket``, made once."""
        if bucket not in self.prepared:
            self.prepared[bucket] = bucket.views(self.data)
        return self.prepared[bucket]

    def copy(self, bucket: Bucket, grads: Mapping[Tensor, Tensor], accumulate: bool = False) -> None:
        """Write gradients of ``bucket`` (or add them) to their places."""
        if self.last is not bucket:
            self.last = None
        self.views(bucket).copy(grads, accumulate)

    def complete(self, bucket: Bucket, missing: Iterable[Tensor]) -> None:
        """Write zeros wherever no gradient of ``bucket`` has been written."""
        self.views(bucket).clear(missing, tails=self.last is not bucket)
        self.last = bucket


def cut_into_buckets(routes: Iterable[Route], plan: Plan, numel: int) -> list[Bucket]:
    """Buckets of up to ``numel`` elements of one dtype and device, in the order of the routes."""
    buckets: list[Bucket] = []
    waiting: dict[tuple[torch.dtype, torch.device], list[Route]] = {}
    for route in routes:
        pending = waiting.setdefault((route.param.dtype, route.param.device), [])
        if pending and sum(r.numel for r in pending) + route.numel > numel:
            buckets.append(Bucket(pending, plan))
            pending.clear()
        pending.append(route)
    return buckets + [Bucket(pending, plan) for pending in waiting.values()]
