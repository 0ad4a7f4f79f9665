"""The moments of a window on this rank's shards: merged from the gradients of all ranks, or first in each node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.buckets import Bucket, Piece
from ds_vrgd.moments.chan import merge_chunks_, merge_nodes_
from ds_vrgd.moments.groups import NodeGroups
from ds_vrgd.moments.streams import Streams

# Buckets whose moments are between the nodes at once.
IN_FLIGHT = 2

_Pair = tuple[Tensor, Tensor]


class ShardStore:
    """``total`` and ``m2`` of every shard, from its first bucket in a window to the window's end.

    Without ``variance``, ``m2`` has no elements.
    """

    def __init__(self, buckets: Sequence[Bucket], *, variance: bool = True) -> None:
        self._buckets, self._variance = buckets, variance
        self._like: dict[Tensor, tuple[torch.dtype, torch.device]] = {}
        pieces: dict[Tensor, list[Piece]] = {}
        for bucket in buckets:
            for piece in bucket.pieces:
                pieces.setdefault(piece.shard, []).append(piece)
                dtype, _ = self._like.get(piece.shard, (torch.float32, None))
                self._like[piece.shard] = torch.promote_types(bucket.dtype, dtype), bucket.device
        self._gaps = {shard: _gaps(shard, of_shard) for shard, of_shard in pieces.items()}
        self._held: dict[Tensor, _Pair] = {}

    def open(self, bucket: Bucket) -> None:
        """Allocate the moments that ``bucket`` brings: zero in the padding of shards, not initialised elsewhere."""
        for piece in bucket.pieces:
            shard = piece.shard
            if shard not in self._held:
                self._held[shard] = self._empty(shard.numel(), *self._like[shard])
                gaps = [moment[start:end] for moment in self._held[shard] for start, end in self._gaps[shard]]
                if gaps:
                    torch._foreach_zero_(gaps)

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> _Pair:
        total, m2 = (torch.empty(size, dtype=dtype, device=device) for size in (numel, numel * self._variance))
        return total, m2

    def views(self, piece: Piece) -> _Pair:
        """Return ``total`` and ``m2`` of ``piece``."""
        total, m2 = self._held[piece.shard]
        end = piece.shard_start + piece.numel
        return total[piece.shard_start : end], m2[piece.shard_start : end]

    def merge(self, bucket: Bucket, received: Tensor, parts: int) -> None:
        """Merge one micro-batch of chunk gradients, ``(chunks, own)``, into the ``parts`` before it."""
        for piece in bucket.pieces:
            merge_chunks_(received[:, piece.start : piece.start + piece.numel], *self.views(piece), parts)

    def drop(self, bucket: Bucket, param: Tensor) -> None:
        """Count what was merged of one parameter as zeros."""
        ((start, numel),) = bucket.received[param]
        for piece in bucket.pieces if numel else ():
            if piece.start <= start < piece.start + piece.numel:
                for moment in self.views(piece):
                    moment[start - piece.start : start - piece.start + numel].zero_()

    def finish(self, parts: int) -> None:
        """Complete the moments of the shards over ``parts`` micro-batches: nothing is left to do."""

    def of(self, shard: Tensor) -> _Pair | None:
        """Return ``total`` and ``m2`` of a shard; None if nothing has come for it."""
        return self._held.get(shard)

    def nbytes(self) -> int:
        """Return the bytes held now."""
        return sum(moment.nbytes for held in self._held.values() for moment in held)

    def sent_bytes(self) -> int:
        """Return the bytes that :meth:`finish` sends to other ranks."""
        return 0

    def close(self) -> None:
        """Release all memory."""
        self._held.clear()


class NodeStore(ShardStore):
    """The store for two levels: gradients travel inside a node, and once per window the moments between the nodes.

    Local rank j of a node receives, from the ranks of its node, the gradients of everything that the ranks with local
    index j own, on all nodes: its *column*. At the end of the window these ranks exchange the moments of what they own.

    Memory: 8 bytes per element of the column while a window is open; in :meth:`finish`, those of the shards, and the
    regions of two buckets per node.

    Everything runs on the side stream of ``streams``; ``chunks`` is the number of chunks of a micro-batch on one node.

    Attributes:
        compare: called with each bucket and the nodes' totals of what this rank owns, ``(nodes, own)``; or None.
    """

    def __init__(
        self, buckets: Sequence[Bucket], groups: NodeGroups, streams: Streams, chunks: int, *, variance: bool = True
    ) -> None:
        super().__init__(buckets, variance=variance)
        self._groups, self._streams, self._chunks = groups, streams, chunks
        self.compare: Callable[[Bucket, Tensor], None] | None = None
        self._columns: dict[Bucket, _Pair] = {}

    def open(self, bucket: Bucket) -> None:
        """Allocate the moments of this rank's column of ``bucket``."""
        if bucket not in self._columns:
            wide = torch.promote_types(bucket.dtype, torch.float32)
            self._columns[bucket] = self._empty(bucket.own, wide, bucket.device)

    def merge(self, bucket: Bucket, received: Tensor, parts: int) -> None:
        """Merge one micro-batch of the node's chunk gradients, ``(chunks, own)``."""
        merge_chunks_(received, *self._columns[bucket], parts)

    def drop(self, bucket: Bucket, param: Tensor) -> None:
        """Count what was merged of one parameter on this node as zeros."""
        for start, numel in bucket.received[param]:
            for moment in self._columns[bucket]:
                moment[start : start + numel].zero_()

    def finish(self, parts: int) -> None:
        """Merge the nodes' moments over ``parts`` micro-batches into the shards, on the side stream; a collective."""
        for bucket in self._buckets:
            super().open(bucket)
        self._streams.fork(())
        with self._streams.side():
            flights: deque[tuple[Bucket, _Pair, list[Any]]] = deque()
            for bucket in self._buckets:
                if len(flights) == IN_FLIGHT:
                    self._merge_oldest(flights, parts)
                flights.append(self._launch(bucket))
            while flights:
                self._merge_oldest(flights, parts)

    def _column(self, bucket: Bucket) -> list[int]:
        """Return the elements that each node's rank of this column owns."""
        return bucket.regions[self._groups.index :: self._groups.per_node]

    def _launch(self, bucket: Bucket) -> tuple[Bucket, _Pair, list[Any]]:
        """Begin the exchange of a bucket's moments; what arrives is ``(nodes, own)`` each."""
        nodes = self._groups.nodes
        column, own = self._column(bucket), bucket.regions[self._groups.rank]
        held = self._columns[bucket]
        totals, m2s = held[0].new_empty(nodes, own), held[1].new_empty(nodes, own * self._variance)
        travelling = list(zip((totals, m2s), held, strict=True))[: 1 + self._variance]
        works = [
            torch.distributed.all_to_all_single(
                received.view(-1), moment, [own] * nodes, column, group=self._groups.across, async_op=True
            )
            for received, moment in travelling
        ]
        return bucket, (totals, m2s), works

    def _merge_oldest(self, flights: deque[tuple[Bucket, _Pair, list[Any]]], parts: int) -> None:
        """Wait for the moments of the oldest exchange, and merge them."""
        bucket, moments, works = flights.popleft()
        for work in works:
            work.wait()
        if self.compare is not None:
            self.compare(bucket, moments[0])
        for piece in bucket.pieces:
            totals, m2s = (rows[:, piece.start : piece.start + piece.numel] for rows in moments)
            merge_nodes_(totals, m2s, *self.views(piece), parts, self._chunks)

    def nbytes(self) -> int:
        """Return the bytes held now."""
        return super().nbytes() + sum(moment.nbytes for column in self._columns.values() for moment in column)

    def sent_bytes(self) -> int:
        """Return the bytes that :meth:`finish` sends to other nodes: the moments of what they own."""
        sent = 0
        for bucket in self._buckets:
            elements = sum(self._column(bucket)) - bucket.regions[self._groups.rank]
            sent += (1 + self._variance) * elements * torch.promote_types(bucket.dtype, torch.float32).itemsize
        return sent

    def close(self) -> None:
        """Release all memory."""
        self._columns.clear()
        super().close()


def on_device_of(shard: Tensor, moment: Tensor) -> Tensor:
    """Return ``moment`` on the device of ``shard``: itself, or a copy of it.

    The copy is in page-locked memory where the shard's gradient is (DeepSpeed's ``offload_optimizer.pin_memory``): a
    GPU fills that many times faster than fresh pages, and torch keeps it for the next step.
    """
    if moment.device == shard.device:
        return moment
    pinned = shard.grad is not None and shard.grad.is_pinned()
    copy = torch.empty(moment.shape, dtype=moment.dtype, device=shard.device, pin_memory=pinned)
    return copy.copy_(moment)


def _gaps(shard: Tensor, pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """Return ``(start, end)`` of what no piece of the shard covers."""
    gaps, end = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.shard_start):
        gaps.append((end, piece.shard_start))
        end = piece.shard_start + piece.numel
    return [(start, end) for start, end in [*gaps, (end, shard.numel())] if start < end]
