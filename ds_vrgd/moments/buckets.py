"""The owners of the elements, and the buckets in which gradients travel to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_vrgd.moments.groups import NodeGroups

# NCCL copies what begins at an odd address up to twice as slowly: regions are padded to 128 bytes in half precision.
ALIGNMENT = 64

# Among more peers, a parameter's equal slots are copied as one strided block rather than one by one.
FEW_PEERS = 16

_Block = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides and offset in a send buffer


@dataclass(frozen=True)
class Route:
    """The owners of one parameter's elements."""

    param: Tensor  # whose gradient is observed
    name: str  # for messages
    numel: int  # its elements, on all ranks together
    runs: tuple[tuple[int, int], ...]  # (rank, elements) of consecutive runs of it, flattened, by ascending rank
    shard: Tensor  # this rank's optimizer tensor that holds its run
    shard_start: int  # where its run begins in ``shard``, if it has one; with ``slot``, where its slot begins
    # Elements that the exchange and the shard reserve for the run on *every* rank (ZeRO-3 cuts each parameter into
    # equal slots); None where they reserve exactly the runs.
    slot: int | None = None
    # Index among all routes in the order of the shards and of their elements, the same on all ranks. Neighbours in a
    # shard that travel together are merged in one piece; it changes no value.
    place: int = 0
    dtype: torch.dtype | None = None  # in which the gradient travels; None for the parameter's own

    @property
    def wire(self) -> torch.dtype:
        """Return the dtype in which the gradient travels."""
        return self.dtype or self.param.dtype

    def reserved(self, ranks: int) -> list[int]:
        """Return the elements that the exchange reserves for each rank."""
        runs = dict(self.runs)
        return [runs.get(rank, 0) if self.slot is None else self.slot for rank in range(ranks)]


class Piece(NamedTuple):
    """Neighbours in this rank's region of a bucket, from ``start`` on, that are neighbours in a shard, too."""

    start: int
    numel: int
    shard: Tensor
    shard_start: int


class Bucket:
    """Parameters whose gradients travel together.

    In a send buffer, the ranks' regions are in the order of columns, so that each peer receives one contiguous piece.
    In a region, parameters are in the order of their elements in the shards, and padding comes last.

    Attributes:
        routes: in the order in which the gradients are expected.
        regions: elements that each data-parallel rank owns, and padding.
        splits: elements that each peer receives.
        own: those that this rank receives from each peer.
        pieces: this rank's region, cut where its elements are no neighbours in the shards.
        blocks, sizes: by parameter, the parts of its gradient in a send buffer, and the elements of each.
        tails: ``(start, elements)`` of what slots and regions reserve in a send buffer and no gradient fills.
        received: by parameter, ``(start, elements)`` of its slots in each row that this rank receives.
    """

    def __init__(self, routes: Sequence[Route], groups: NodeGroups) -> None:
        self.routes = tuple(routes)
        self.dtype, self.device = routes[0].wire, routes[0].param.device
        slots = {route.param: route.reserved(groups.ranks) for route in routes}
        owned = [sum(column) for column in zip(*slots.values(), strict=True)]
        self.regions = [-(-numel // ALIGNMENT) * ALIGNMENT for numel in owned]
        order = groups.order
        in_order = [self.regions[rank] for rank in order]
        bases = dict(zip(order, itertools.accumulate(in_order, initial=0), strict=False))
        self.numel = sum(in_order)
        self.splits = [sum(in_order[i : i + groups.nodes]) for i in range(0, groups.ranks, groups.nodes)]
        self.own = self.splits[groups.index]
        self.pieces: list[Piece] = []
        self.blocks: dict[Tensor, list[_Block]] = {}
        self.sizes: dict[Tensor, list[int]] = {}
        self.tails = [(bases[rank] + own, self.regions[rank] - own) for rank, own in enumerate(owned)]
        self.received: dict[Tensor, list[tuple[int, int]]] = {}
        mine = order[groups.index * groups.nodes : (groups.index + 1) * groups.nodes]
        within = [0] * groups.ranks
        for route in sorted(routes, key=lambda route: route.place):
            starts = [bases[rank] + offset for rank, offset in enumerate(within)]
            widths, runs = slots[route.param], dict(route.runs)
            self.blocks[route.param] = list(self._cut(route, starts, groups))
            self.sizes[route.param] = [torch.Size(size).numel() for size, _, _ in self.blocks[route.param]]
            self.received[route.param] = [(starts[rank] - bases[mine[0]], widths[rank]) for rank in mine]
            if (numel := widths[groups.rank]) > 0:
                last = self.pieces[-1] if self.pieces else None
                if last and last.shard is route.shard and last.shard_start + last.numel == route.shard_start:
                    self.pieces[-1] = last._replace(numel=last.numel + numel)
                else:
                    self.pieces.append(Piece(within[groups.rank], numel, route.shard, route.shard_start))
            for rank, width in enumerate(widths):
                held = runs.get(rank, 0)
                self.tails.append((starts[rank] + held, width - held))
                within[rank] += width
        self.tails = [(start, numel) for start, numel in self.tails if numel]

    def _cut(self, route: Route, starts: Sequence[int], groups: NodeGroups) -> Iterator[_Block]:
        """Cut a gradient into as few copies as there are: one per rank, or one for the equal slots of many peers."""
        full = 0
        if route.slot and groups.per_node > FEW_PEERS and len(set(self.regions)) == 1:
            full = route.numel // route.slot
            for first in range(0, full, groups.per_node):
                rows = min(groups.per_node, full - first)
                strides = (groups.nodes * self.regions[0], 1)
                yield ((rows, route.slot), strides, starts[first]) if rows > 1 else ((route.slot,), (1,), starts[first])
        for rank, numel in route.runs[full:]:
            if numel:
                yield (numel,), (1,), starts[rank]


class Buffer:
    """Memory that buckets take turns in: one-dimensional ``data``, written again after the event ``free``."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.free: Any = None
        self._prepared: dict[Bucket, tuple[dict[Tensor, list[Tensor]], list[Tensor]]] = {}
        self._last: Bucket | None = None  # the bucket that used it last, whose tails are zero

    def _views(self, bucket: Bucket) -> tuple[dict[Tensor, list[Tensor]], list[Tensor]]:
        """Return where the gradients of ``bucket`` go, and its tails; made once."""
        if bucket not in self._prepared:
            data, begin = self.data, self.data.storage_offset()
            views = {
                param: [data.as_strided(size, strides, begin + start) for size, strides, start in blocks]
                for param, blocks in bucket.blocks.items()
            }
            self._prepared[bucket] = views, [data[start : start + numel] for start, numel in bucket.tails]
        return self._prepared[bucket]

    def parts(self, bucket: Bucket, param: Tensor) -> list[Tensor]:
        """Return the parts of one gradient of ``bucket``, as views."""
        return self._views(bucket)[0][param]

    def copy(self, bucket: Bucket, grads: Mapping[Tensor, Tensor], accumulate: bool = False) -> None:
        """Write gradients of ``bucket``, of any shape and strides, together; or add them to what is there."""
        self._last = self._last if self._last is bucket else None
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for param, grad in grads.items():
            views = self.parts(bucket, param)
            if len(views) == 1 and views[0].dim() == 1 and grad.is_contiguous():
                targets.append(views[0])
                sources.append(grad.view(-1))
                continue
            parts = grad.reshape(-1).split_with_sizes(bucket.sizes[param]) if views else ()
            for view, part in zip(views, parts, strict=True):
                if view.dim() == 1:
                    targets.append(view)
                    sources.append(part)
                else:
                    part = part.view(view.shape)
                    view.add_(part) if accumulate else view.copy_(part)
        if targets:
            torch._foreach_add_(targets, sources) if accumulate else torch._foreach_copy_(targets, sources)

    def complete(self, bucket: Bucket, missing: Iterable[Tensor]) -> None:
        """Write zeros wherever no gradient of ``bucket`` has been written."""
        views, tails = self._views(bucket)
        empty = [view for param in missing for view in views[param]] + (tails if self._last is not bucket else [])
        if empty:
            torch._foreach_zero_(empty)
        self._last = bucket


def cut_into_buckets(routes: Iterable[Route], groups: NodeGroups, numel: int) -> list[Bucket]:
    """Return buckets of up to ``numel`` elements of one dtype and device, in the order of the routes."""
    buckets: list[Bucket] = []
    waiting: dict[tuple[torch.dtype, torch.device], list[Route]] = {}
    for route in routes:
        pending = waiting.setdefault((route.wire, route.param.device), [])
        if pending and sum(r.numel for r in pending) + route.numel > numel:
            buckets.append(Bucket(pending, groups))
            pending.clear()
        pending.append(route)
    return buckets + [Bucket(pending, groups) for pending in waiting.values()]
