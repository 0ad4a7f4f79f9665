"""Chunk moments where every rank owns a shard of every parameter: ZeRO stages 1, 2 and 3.

Gradients are copied into the send buffer of a static bucket. A full bucket is exchanged by one all-to-all, after
which the owner of a shard holds the gradients of all ranks for its elements, and forms their mean and *centred* sum
of squares locally, in fp32 and in rank order.

The wire carries the gradient itself, in its own dtype: (N-1)/N of its bytes, as a reduce-scatter would.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.buckets import Bucket, Buffer, Route, cut_into_buckets
from ds_vrgd.moments.chan import Moments, zeros_like
from ds_vrgd.moments.compare import Comparison, Run
from ds_vrgd.moments.groups import NodeGroups, SequenceGroups
from ds_vrgd.moments.hooks import value_of
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.store import NodeStore, ShardStore, on_device_of
from ds_vrgd.moments.streams import Streams


@dataclass
class _Filling:
    """A bucket that is being filled in the open micro-batch."""

    buffer: Buffer | None = None  # what has been copied at once; None if nothing has
    copied: set[Tensor] = field(default_factory=set)  # parameters whose gradients are in ``buffer``
    held: dict[Tensor, Tensor] = field(default_factory=dict)  # gradients that wait for the others of the bucket
    writers: set[Any] = field(default_factory=set)  # streams that have written to ``buffer``
    producers: set[Any] = field(default_factory=set)  # streams that ``held`` comes from


class ShardedMoments:
    """Mean and centred sum of squares over the chunks of a window, on this rank's shards.

    Buckets leave in one fixed order on every rank, whatever order autograd finishes the gradients in; one that
    is ready too early waits, and whatever is missing when the micro-batch ends travels as zeros. So the ranks
    issue the same collectives even where a parameter took part on some of them only.

    On CUDA, exchanges start and what they bring is merged on a stream of their own. The streams that gradients come
    from wait for it where a buffer has not been sent yet, and whoever reads moments waits in :meth:`finish`: the last
    exchange of a micro-batch overlaps the forward pass of the next.

    Memory: 8 bytes per element of the shard, 4 for the mean alone, from a window's first bucket to :meth:`reset`. Until
    :meth:`detach`, a few buffers of a bucket in the wire dtype: ``in_flight + 1`` to send (with copies, more where
    gradients finish far out of order), and ``in_flight`` to receive, each as large as the largest region of this rank
    times the ranks.

    Args:
        routes: one per parameter, in the order in which the gradients are expected.
        group: process group of the data-parallel ranks.
        bucket_numel: elements of a bucket; a larger parameter gets a bucket of its own.
        nodes: exchange gradients inside the nodes only, and moments between them.
        in_flight: exchanges that may be under way at once.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        sequences: which ranks compute one chunk together; None where every rank has chunks of its own. Their parts
            are summed where they arrive, so that nothing more travels.
        eager: send a bucket as soon as it is full; else all of them at the end of the micro-batch. Of several exchanges
            over different groups only one may be eager, because the ranks must start them in one order.
        variance: whether the centred sum of squares is wanted; without it, moments are the mean alone.
        compares: whether the ranks are compared.

    Attributes:
        routes, group: as given.
        comparison: of the ranks in this rank's node, and of the nodes; None where they are not compared.
        before_first_bucket: called before the first exchange of every micro-batch, on all ranks alike, where they
            exchange.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        group: Any,
        bucket_numel: int,
        *,
        nodes: NodeGroups | None = None,
        in_flight: int = 2,
        norms: ChunkNorms | None = None,
        sequences: SequenceGroups | None = None,
        eager: bool = True,
        variance: bool = True,
        compares: bool = False,
    ) -> None:
        self.routes, self.group = tuple(routes), group
        self.before_first_bucket: Callable[[], None] | None = None
        self._norms = norms
        self._groups = nodes or NodeGroups.single(group)
        self._sequences, self._variance = sequences, variance
        self.chunks_at_once = self._groups.ranks // (1 if sequences is None else sequences.size)
        first, peers = self._groups.rank - self._groups.index, self._groups.per_node
        self._rows = [] if sequences is None else sequences.rows(range(first, first + peers))
        self.comparison = self._compared() if compares else None
        self._bucket_numel, self._in_flight, self._eager, self._held_back = bucket_numel, in_flight, eager, False
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._streams = Streams(torch.device("cpu"))
        self._store = ShardStore(())
        self._filling: dict[int, _Filling] = {}
        self._flights: deque[tuple[Bucket, Buffer, Buffer, Any]] = deque()
        self._spare: dict[tuple[str, torch.dtype, torch.device], deque[Buffer]] = {}
        self._next = self._micro_batches = self._finished = 0

    def _compared(self) -> Comparison:
        """Return the comparison of the ranks in this node, or of the first of those that share their samples."""
        names, groups = [route.name for route in self.routes], self._groups
        everyone = torch.distributed.get_process_group_ranks(self.group)
        first = groups.rank - groups.index
        near = [everyone[first + row] for row in ([rows[0] for rows in self._rows] or range(groups.per_node))]
        comparison = Comparison(names, near, groups.local, self.chunks_at_once)
        if groups.nodes > 1:
            comparison.across = Comparison(names, everyone[:: groups.per_node], self.group, self.chunks_at_once)
        return comparison

    def _runs(self, bucket: Bucket, ranks: Sequence[int], base: int = 0) -> list[Run]:
        """Return which columns belong to which layer in what the peers send, or in what the nodes send (with base)."""
        runs, index = [], {route.param: index for index, route in enumerate(self.routes)}
        for route in bucket.routes:
            own = dict(route.runs)
            for rank in ranks:
                start, _ = bucket.received[route.param][rank // self._groups.per_node]
                if own.get(rank):
                    before = sum(numel for earlier, numel in route.runs if earlier < rank)
                    runs.append((start - base, own[rank], index[route.param], before))
        return runs

    def _compare_nodes(self, across: Comparison, bucket: Bucket, totals: Tensor) -> None:
        groups = self._groups
        base = sum(bucket.regions[groups.index : groups.rank : groups.per_node])
        across.add(totals, bucket, lambda: self._runs(bucket, [groups.rank], base))

    def _prepare(self) -> None:
        """Cut the routes into buckets; at the first gradient, when devices and dtypes are final."""
        if self._buckets:
            return
        self._buckets = cut_into_buckets(self.routes, self._groups, self._bucket_numel)
        for index, bucket in enumerate(self._buckets):
            self._bucket_of |= {route.param: index for route in bucket.routes}
        self._streams = Streams(self._buckets[0].device)
        if self._groups.nodes == 1:
            self._store = ShardStore(self._buckets, variance=self._variance)
        else:
            chunks = len(self._rows) or self._groups.per_node
            self._store = NodeStore(self._buckets, self._groups, self._streams, chunks, variance=self._variance)
            if self.comparison is not None and self.comparison.across is not None:
                self._store.compare = functools.partial(self._compare_nodes, self.comparison.across)

    def _buffer(self, purpose: str, bucket: Bucket) -> Buffer:
        """Return a buffer that is large enough ``"to send"`` or ``"to receive"`` any bucket of this dtype."""
        spare = self._spare.setdefault((purpose, bucket.dtype, bucket.device), deque())
        if spare:
            return spare.popleft()  # the one that has rested longest: most likely nobody has to wait for it
        alike = [b for b in self._buckets if (b.dtype, b.device) == (bucket.dtype, bucket.device)]
        numel = max(b.numel if purpose == "to send" else b.own * self._groups.per_node for b in alike)
        return Buffer(torch.empty(numel, dtype=bucket.dtype, device=bucket.device))

    def _recycle(self, purpose: str, buffer: Buffer) -> None:
        self._spare[purpose, buffer.data.dtype, buffer.data.device].append(buffer)

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take one gradient of one parameter, before any reduction; may start exchanges."""
        self._prepare()
        index, grad = self._bucket_of[param], value_of(grad)
        if index < self._next:
            name = next(route.name for route in self.routes if route.param is param)
            raise RuntimeError(
                f"the gradient of '{name}' arrived twice in one backward pass, the second time after its exchange. "
                "This is what a weight shared between reentrant checkpoint segments does: set use_reentrant=False in "
                'the activation checkpointing, or gamma=1.0 for its param group together with reduction="observe".'
            )
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = _Filling()
        if param in filling.held or (keep and param not in filling.copied):
            first = filling.held.get(param)
            if first is not None:
                self._streams.gather(filling.producers, (first,))
                grad = first + grad
            filling.held[param] = grad
            filling.producers.add(self._streams.here())
        else:
            self._copy(filling, param, grad)
        while self._eager and not self._held_back and self._next in self._filling:
            filling = self._filling[self._next]
            if len(filling.copied) + len(filling.held) < len(self._buckets[self._next].routes):
                break
            self._launch()

    def _copy(self, filling: _Filling, param: Tensor, grad: Tensor) -> None:
        bucket = self._buckets[self._bucket_of[param]]
        again = param in filling.copied
        if filling.buffer is None:
            filling.buffer = self._buffer("to send", bucket)
        here = self._streams.here()
        if here not in filling.writers:
            self._streams.wait(filling.buffer.free)
            filling.writers.add(here)
        if again:
            self._streams.gather(filling.writers, ())
        filling.buffer.copy(bucket, {param: grad}, accumulate=again)
        filling.copied.add(param)

    def drop(self, param: Tensor) -> None:
        """Forget this window's chunks of one parameter, also those that are under way; on all ranks alike."""
        self._prepare()
        index = self._bucket_of[param]
        if index in self._filling:
            self._filling[index].copied.discard(param)
            self._filling[index].held.pop(param, None)
        if self._micro_batches or index < self._next:
            self._finished = 0
            self._streams.fork(())
            with self._streams.side():
                while self._flights:
                    self._merge_oldest()
                self._store.drop(self._buckets[index], param)
                if self.comparison is not None:
                    self.comparison.drop([place for place, route in enumerate(self.routes) if route.param is param])
        if self._norms is not None:
            self._norms.forget(param)

    def _launch(self) -> None:
        """Send the next bucket; gradients that never came are zeros."""
        bucket = self._buckets[self._next]
        filling = self._filling.pop(self._next, None) or _Filling()
        sent = filling.buffer or self._buffer("to send", bucket)
        self._streams.wait(sent.free)
        self._streams.gather(filling.producers, filling.held.values())
        sent.copy(bucket, filling.held)
        if self._norms is not None:
            self._norms.note(self._micro_batches, filling.held.items())
        came = filling.copied | filling.held.keys()
        sent.complete(bucket, [route.param for route in bucket.routes if route.param not in came])
        self._store.open(bucket)
        self._streams.fork(filling.writers)
        self._next += 1
        with self._streams.side():
            if self._next == 1 and self.before_first_bucket is not None:
                self.before_first_bucket()
            if self._norms is not None and filling.copied:
                copied = [route.param for route in bucket.routes if route.param in filling.copied]
                self._norms.note(self._micro_batches, [(p, view) for p in copied for view in sent.parts(bucket, p)])
            while len(self._flights) >= self._in_flight:
                self._merge_oldest()
            self._flights.append(self._send(bucket, sent))

    def _send(self, bucket: Bucket, sent: Buffer) -> tuple[Bucket, Buffer, Buffer, Any]:
        """Begin an exchange; return its bucket, the buffers sent and received, and the work (None without peers)."""
        if self._groups.per_node == 1:
            return bucket, sent, sent, None
        received = self._buffer("to receive", bucket)
        work = torch.distributed.all_to_all_single(
            received.data[: bucket.own * self._groups.per_node],
            sent.data[: bucket.numel],
            output_split_sizes=[bucket.own] * self._groups.per_node,
            input_split_sizes=bucket.splits,
            group=self._groups.local,
            async_op=True,
        )
        return bucket, sent, received, work

    def _merge_oldest(self) -> None:
        """Wait for the oldest exchange and merge what it brought."""
        bucket, sent, received, work = self._flights.popleft()
        if work is not None:
            work.wait()
            sent.free = self._streams.mark(sent.free)
        if bucket.own:
            rows = received.data[: bucket.own * self._groups.per_node].view(self._groups.per_node, bucket.own)
            if self._sequences is not None:
                rows = self._sequences.join(rows, self._rows)
            self._store.merge(bucket, rows, self._micro_batches)
            if self.comparison is not None:
                column = range(self._groups.index, self._groups.ranks, self._groups.per_node)
                self.comparison.add(rows, bucket, lambda: self._runs(bucket, column))
        if work is None:
            sent.free = self._streams.mark(sent.free)
        else:
            self._recycle("to receive", received)
        self._recycle("to send", sent)

    def hold_back(self, held: bool) -> None:
        """Send nothing before the end of the open micro-batch, because more backward passes belong to it."""
        self._held_back = held

    def end_micro_batch(self) -> None:
        """Close the micro-batch: send what has not left yet, and have everything merged."""
        self._prepare()  # other ranks may have gradients to send
        while self._next < len(self._buckets):
            self._launch()
        with self._streams.side():
            while self._flights:
                self._merge_oldest()
        self._next = 0
        self._micro_batches += 1

    def finish(self) -> int:
        """Return k, the number of chunks in this window; with ``nodes``, a collective after more micro-batches."""
        if self._finished < self._micro_batches:
            self._store.finish(self._micro_batches)
            self._finished = self._micro_batches
        self._streams.join()
        return self._micro_batches * self.chunks_at_once

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments over all k chunks, laid out as the shard ``tensor``; 0 in its padding.

        They are on the shard's device, and belong to the window until :meth:`reset`: callers may write to the padding
        alone. Where the gradients are on another device, they are copies.
        """
        if self._groups.nodes > 1 and self._finished < self._micro_batches:
            raise RuntimeError("the nodes have not merged their moments yet: finish() comes before moments()")
        self._streams.join()  # a reader in the middle of a window has not been through finish()
        held = self._store.of(tensor) if self._micro_batches else None
        if held is None:
            return zeros_like(tensor, max(self._micro_batches, 1))
        for moment in held:
            self._streams.use(moment)
        total, m2 = (on_device_of(tensor, moment) for moment in held)
        return Moments(total, m2, self._micro_batches)

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now, outside a micro-batch: of moments, and of the buffers to send and to receive."""
        return self._store.nbytes(), sum(buffer.data.nbytes for spare in self._spare.values() for buffer in spare)

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends to others: per micro-batch, and once per window."""
        sent = sum((bucket.numel - bucket.own) * bucket.dtype.itemsize for bucket in self._buckets)
        return sent, self._store.sent_bytes()

    def reset(self) -> None:
        """Begin the next window, also after a backward pass that was broken off half-way."""
        self._streams.join()
        for filling in self._filling.values():
            if filling.buffer is not None:
                self._recycle("to send", filling.buffer)
        self._filling.clear()
        self._flights.clear()  # with their buffers: nobody knows whether the other ranks have sent theirs
        self._store.close()
        if self.comparison is not None:
            self.comparison.clear()
        if self._norms is not None:
            self._norms.clear()
        self._next = self._micro_batches = self._finished = 0

    def detach(self) -> None:
        """Release all memory and callbacks for good."""
        self.reset()
        self.before_first_bucket = None
        self._buckets.clear()
        self._spare.clear()
