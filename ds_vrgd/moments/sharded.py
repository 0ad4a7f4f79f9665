"""Chunk moments where every rank owns a shard of every parameter: ZeRO stages 1, 2 and 3.

A gradient is copied, as autograd hands it out, into the send buffer of a static bucket. A full bucket is
exchanged by one all-to-all, after which the owner of a shard holds the gradients of all ranks for its
elements, and forms their mean and *centred* sum of squares locally, in fp32 and in rank order.

The wire carries the gradient itself, in its own dtype: (N-1)/N of its bytes, as a reduce-scatter would.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.chan import Moments, merge_, moments_of


@dataclass(frozen=True)
class Route:
    """Where the elements of one parameter are owned.

    Attributes:
        param: the parameter whose gradient is observed.
        name: its name, for messages.
        numel: its elements, on all ranks together.
        runs: ``(rank, elements)`` of consecutive runs of the flattened parameter, by ascending rank.
        shard: this rank's optimizer tensor that holds its run.
        shard_start: where its run begins in ``shard``; meaningless if it has none.
        slot: elements that the exchange reserves for the run on *every* rank (ZeRO-3 cuts each parameter into
            equal slots); None to reserve exactly the runs.
    """

    param: Tensor
    name: str
    numel: int
    runs: tuple[tuple[int, int], ...]
    shard: Tensor
    shard_start: int
    slot: int | None = None


@dataclass(frozen=True)
class _Block:
    """``rows x columns`` consecutive elements of a gradient and their place in the send buffer."""

    source: int
    rows: int
    columns: int
    target: int
    row_stride: int


@dataclass(frozen=True)
class _Piece:
    """A run of a bucket's own region, and its place in a shard."""

    start: int
    numel: int
    shard: Tensor
    shard_start: int


class _Bucket:
    """Parameters whose gradients travel together, and the moments of this rank's region of them."""

    def __init__(self, routes: Sequence[Route], rank: int, ranks: int) -> None:
        self.routes = tuple(routes)
        self.dtype, self.device = routes[0].param.dtype, routes[0].param.device
        widths = [self._widths(route, ranks) for route in routes]
        self.region = [sum(column) for column in zip(*widths, strict=True)]
        *bases, self.numel = itertools.accumulate(self.region, initial=0)
        self.blocks: dict[Tensor, tuple[_Block, ...]] = {}
        self.pieces: list[_Piece] = []
        within = [0] * ranks
        for route, width in zip(routes, widths, strict=True):
            starts = [base + offset for base, offset in zip(bases, within, strict=True)]
            self.blocks[route.param] = tuple(self._blocks(route, starts))
            own = dict(route.runs).get(rank, 0)
            if own:
                self.pieces.append(_Piece(within[rank], own, route.shard, route.shard_start))
            within = [w + add for w, add in zip(within, width, strict=True)]
        dtype = torch.promote_types(self.dtype, torch.float32)
        self.mean = torch.zeros(self.region[rank], dtype=dtype, device=self.device)
        self.m2 = torch.zeros_like(self.mean)

    @staticmethod
    def _widths(route: Route, ranks: int) -> list[int]:
        if route.slot is not None:
            return [route.slot] * ranks
        runs = dict(route.runs)
        return [runs.get(rank, 0) for rank in range(ranks)]

    def _blocks(self, route: Route, starts: Sequence[int]) -> list[_Block]:
        """Cut a gradient into as few copies as there are; equal slots travel as one strided block."""
        if route.slot is None:
            blocks, source = [], 0
            for rank, numel in route.runs:
                blocks.append(_Block(source, 1, numel, starts[rank], numel))
                source += numel
            return blocks
        full, rest = divmod(route.numel, route.slot) if route.slot else (0, 0)
        stride = self.region[0]
        blocks = [_Block(0, full, route.slot, starts[0], stride)] if full else []
        if rest:
            blocks.append(_Block(full * route.slot, 1, rest, starts[0] + full * stride, rest))
        return blocks

    def fill(self, buffer: Tensor, param: Tensor, grad: Tensor | None, accumulate: bool = False) -> None:
        """Write a parameter's gradient (zeros for None) to its places in the send buffer."""
        flat = None if grad is None else grad.detach().reshape(-1)
        for block in self.blocks[param]:
            place = buffer.as_strided((block.rows, block.columns), (block.row_stride, 1), block.target)
            if flat is None:
                place.zero_()
                continue
            values = flat[block.source : block.source + block.rows * block.columns].view(block.rows, block.columns)
            place.add_(values) if accumulate else place.copy_(values)


@dataclass
class _Filling:
    """A bucket being filled in the micro-batch that is open."""

    buffer: Tensor
    filled: set[Tensor]
    streams: set[Any]


@dataclass
class _Flight:
    """A bucket on its way."""

    bucket: _Bucket
    sent: Tensor
    received: Tensor
    work: Any | None


class ShardedMoments:
    """Mean and centred sum of squares over the chunks of a window, on this rank's shards.

    Buckets leave in one fixed order on every rank, whatever order autograd finishes the gradients in; one that
    is ready too early waits, and whatever is missing when the micro-batch ends travels as zeros. So the ranks
    issue the same collectives even where a parameter took part on some of them only.

    Memory: 8 bytes an element of the shard, and two buffers of a bucket in the wire dtype (more where gradients
    finish far out of order).

    Args:
        routes: one a parameter, in the order in which the gradients are expected.
        group: process group of the data-parallel ranks.
        bucket_numel: elements of a bucket; a larger parameter gets a bucket of its own.
        in_flight: exchanges that may be under way at once.
    """

    def __init__(self, routes: Sequence[Route], group: Any, bucket_numel: int, in_flight: int = 2) -> None:
        self._group = group
        self._rank, self._ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        self._routes = list(routes)
        self._bucket_numel = bucket_numel
        self._in_flight = in_flight
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._name_of = {route.param: route.name for route in routes}
        self._filling: dict[int, _Filling] = {}
        self._flights: list[_Flight] = []
        self._spare: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._next = 0
        self._micro_batches = 0

    def _allocate(self) -> None:
        """Cut the routes into buckets; at the first gradient, when devices and dtypes are final."""
        waiting: dict[tuple[torch.dtype, torch.device], list[Route]] = {}
        for route in self._routes:
            pending = waiting.setdefault((route.param.dtype, route.param.device), [])
            if pending and sum(r.numel for r in pending) + route.numel > self._bucket_numel:
                self._buckets.append(_Bucket(pending, self._rank, self._ranks))
                pending.clear()
            pending.append(route)
        self._buckets += [_Bucket(pending, self._rank, self._ranks) for pending in waiting.values()]
        for index, bucket in enumerate(self._buckets):
            self._bucket_of |= {route.param: index for route in bucket.routes}

    def _buffer(self, numel: int, bucket: _Bucket) -> Tensor:
        spare = self._spare.setdefault((bucket.dtype, bucket.device), [])
        for index, buffer in enumerate(spare):
            if buffer.numel() >= numel:
                return spare.pop(index)
        largest = max(
            max(b.numel, b.region[self._rank] * self._ranks) for b in self._buckets if b.dtype == bucket.dtype
        )
        return torch.zeros(largest, dtype=bucket.dtype, device=bucket.device)

    def _recycle(self, buffer: Tensor) -> None:
        self._spare[buffer.dtype, buffer.device].append(buffer)

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Take one gradient of one parameter, before any reduction; may start exchanges."""
        if not self._buckets:
            self._allocate()
        index = self._bucket_of[param]
        bucket = self._buckets[index]
        if index < self._next:
            raise RuntimeError(
                f"the gradient of '{self._name_of[param]}' arrived twice in one backward pass, the second time after "
                "its exchange. This is what a weight shared between reentrant checkpoint segments does: set "
                "use_reentrant=False in the activation checkpointing, or gamma=1.0 for its param group."
            )
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = _Filling(self._buffer(bucket.numel, bucket), set(), set())
        bucket.fill(filling.buffer, param, grad, accumulate=param in filling.filled)
        filling.filled.add(param)
        if grad.is_cuda:
            filling.streams.add(torch.cuda.current_stream(grad.device))
        while self._is_ready(self._next):
            self._launch()

    def _is_ready(self, index: int) -> bool:
        filling = self._filling.get(index)
        return filling is not None and len(filling.filled) == len(self._buckets[index].routes)

    def _launch(self) -> None:
        """Send the next bucket; gradients that never came are zeros."""
        bucket = self._buckets[self._next]
        filling = self._filling.pop(self._next, None)
        if filling is None:
            filling = _Filling(self._buffer(bucket.numel, bucket), set(), set())
        for route in bucket.routes:
            if route.param not in filling.filled:
                bucket.fill(filling.buffer, route.param, None)
        for stream in filling.streams:
            torch.cuda.current_stream(bucket.device).wait_stream(stream)
        self._next += 1
        if self._ranks == 1:
            self._flights.append(_Flight(bucket, filling.buffer, filling.buffer, None))
        else:
            own = bucket.region[self._rank]
            received = self._buffer(own * self._ranks, bucket)
            work = torch.distributed.all_to_all_single(
                received[: own * self._ranks],
                filling.buffer[: bucket.numel],
                output_split_sizes=[own] * self._ranks,
                input_split_sizes=bucket.region,
                group=self._group,
                async_op=True,
            )
            self._flights.append(_Flight(bucket, filling.buffer, received, work))
        while len(self._flights) > self._in_flight:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest exchange and merge what it brought."""
        flight = self._flights.pop(0)
        if flight.work is not None:
            flight.work.wait()
        bucket = flight.bucket
        own = bucket.region[self._rank]
        if own:
            mean, m2 = moments_of(flight.received[: own * self._ranks].view(self._ranks, own))
            merge_(bucket.mean, bucket.m2, self._micro_batches * self._ranks, mean, m2, self._ranks)
        self._recycle(flight.sent)
        if flight.received is not flight.sent:
            self._recycle(flight.received)

    def end_micro_batch(self) -> None:
        """Close the micro-batch: send what has not left yet, and merge everything."""
        if not self._buckets:
            self._allocate()  # other ranks may have gradients to send
        while self._next < len(self._buckets):
            self._launch()
        while self._flights:
            self._land()
        self._next = 0
        self._micro_batches += 1

    def finish(self) -> int:
        """k, the number of chunks in this window."""
        return self._micro_batches * self._ranks

    def moments(self, shard: Tensor) -> Moments:
        """Over all k chunks, laid out as ``shard`` is; 0 in its padding.

        Both are fresh tensors of ``shard.numel()`` elements on ``shard``'s device.
        """
        pieces = sorted(
            ((piece, bucket) for bucket in self._buckets for piece in bucket.pieces if piece.shard is shard),
            key=lambda found: found[0].shard_start,
        )
        return Moments(self._lay_out(shard, pieces, lambda b: b.mean), self._lay_out(shard, pieces, lambda b: b.m2))

    @staticmethod
    def _lay_out(
        shard: Tensor, pieces: Sequence[tuple[_Piece, _Bucket]], of_bucket: Callable[[_Bucket], Tensor]
    ) -> Tensor:
        parts, end = [], 0
        for piece, bucket in pieces:
            source = of_bucket(bucket)
            if piece.shard_start > end:
                parts.append(source.new_zeros(piece.shard_start - end))
            parts.append(source[piece.start : piece.start + piece.numel])
            end = piece.shard_start + piece.numel
        if not parts:
            return torch.zeros_like(shard)
        if shard.numel() > end:
            parts.append(parts[0].new_zeros(shard.numel() - end))
        return torch.cat(parts).to(shard.device)

    def reset(self) -> None:
        """Begin the next window, also after a backward pass that was broken off half-way."""
        for filling in self._filling.values():
            self._recycle(filling.buffer)
        self._filling.clear()
        self._flights.clear()
        self._next = 0
        self._micro_batches = 0
