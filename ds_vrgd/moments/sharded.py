"""Chunk moments where every rank owns a shard of every parameter: ZeRO stages 1, 2 and 3.

Gradients are copied into the send buffer of a static bucket. A full bucket is exchanged by one all-to-all, after
which the owner of a shard holds the gradients of all ranks for its elements, and forms their mean and *centred* sum
of squares locally, in fp32 and in rank order.

The wire carries the gradient itself, in its own dtype: (N-1)/N of its bytes, as a reduce-scatter would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.buckets import Bucket, Buffer, cut_into_buckets
from ds_vrgd.moments.chan import Moments
from ds_vrgd.moments.lanes import Lanes, lanes_on
from ds_vrgd.moments.nodes import NodeGroups, NodeMoments
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.route import Plan, Route
from ds_vrgd.moments.sequences import SequenceGroups
from ds_vrgd.moments.store import ShardStore, Sink, beside


@dataclass
class _Filling:
    """A bucket being filled in the micro-batch that is open.

    Attributes:
        buffer: what has been copied at once; None if nothing has.
        copied: parameters whose gradients are in ``buffer``.
        held: gradients that wait for the others of the bucket.
        writers, producers: streams that have written to ``buffer``, and that ``held`` comes from.
    """

    buffer: Buffer | None = None
    copied: set[Tensor] = field(default_factory=set)
    held: dict[Tensor, Tensor] = field(default_factory=dict)
    writers: set[Any] = field(default_factory=set)
    producers: set[Any] = field(default_factory=set)


@dataclass
class _Flight:
    """A bucket on its way."""

    bucket: Bucket
    sent: Buffer
    received: Buffer
    work: Any | None


def _value(grad: Tensor) -> Tensor:
    """``grad`` outside the graph; as it is, where it is in none, as autograd hands it out: this runs once a hook."""
    return grad.detach() if grad.requires_grad else grad


class ShardedMoments:
    """Mean and centred sum of squares over the chunks of a window, on this rank's shards.

    Buckets leave in one fixed order on every rank, whatever order autograd finishes the gradients in; one that
    is ready too early waits, and whatever is missing when the micro-batch ends travels as zeros. So the ranks
    issue the same collectives even where a parameter took part on some of them only.

    On CUDA, exchanges start and what they bring is merged on a stream of their own. The streams that gradients come
    from wait for it where a buffer has not been sent yet, and whoever reads moments, in :meth:`finish`: the last
    exchange of a micro-batch runs beside the forward pass of the next.

    Memory: 8 bytes an element of the shard from a window's first bucket to :meth:`reset`. For good, a few buffers of a
    bucket in the wire dtype: ``in_flight + 1`` to send (with :meth:`add`, more where gradients finish far out of
    order), and ``in_flight`` to receive, each as large as the largest region of this rank times the ranks.

    Args:
        routes: one a parameter, in the order in which the gradients are expected.
        group: process group of the data-parallel ranks.
        bucket_numel: elements of a bucket; a larger parameter gets a bucket of its own.
        nodes: exchange gradients inside the nodes only, and moments between them.
        in_flight: exchanges that may be under way at once.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        sequences: which ranks compute one chunk together; None where every rank has chunks of its own. Their parts
            are summed where they arrive, so that nothing more travels.
        eager: send a bucket as soon as it is full; else all of them at the end of the micro-batch. Of several exchanges
            over different groups only one may be eager, for the ranks must start them in one order.
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
    ) -> None:
        self._nodes = nodes
        self._norms = norms
        self._plan = Plan.direct(group) if nodes is None else nodes.plan()
        self._sequences = sequences
        self._eager = eager
        self._rows = [] if sequences is None else sequences.rows(self._plan.peer_ranks)
        self._routes = list(routes)
        self._bucket_numel = bucket_numel
        self._in_flight = in_flight
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[Tensor, int] = {}
        self._name_of = {route.param: route.name for route in routes}
        self._lanes = Lanes()
        self._store = ShardStore(())
        self._sink: Sink = self._store
        self._filling: dict[int, _Filling] = {}
        self._flights: deque[_Flight] = deque()
        self._spare: dict[tuple[str, torch.dtype, torch.device], deque[Buffer]] = {}
        self._next = 0
        self._micro_batches = 0
        self._finished = 0

    def _prepare(self) -> None:
        """Cut the routes into buckets; at the first gradient, when devices and dtypes are final."""
        if self._buckets:
            return
        self._buckets = cut_into_buckets(self._routes, self._plan, self._bucket_numel)
        for index, bucket in enumerate(self._buckets):
            self._bucket_of |= {route.param: index for route in bucket.routes}
        self._lanes = lanes_on(self._buckets[0].device)
        self._sink = self._store = ShardStore(self._buckets)
        if self._nodes is not None:
            chunks = len(self._rows) or self._nodes.per_node
            self._sink = NodeMoments(self._buckets, self._nodes, self._store, self._lanes, chunks)

    def _buffer(self, purpose: str, bucket: Bucket) -> Buffer:
        """A buffer that is large enough ``"to send"`` or ``"to receive"`` any bucket of this dtype."""
        spare = self._spare.setdefault((purpose, bucket.dtype, bucket.device), deque())
        if spare:
            return spare.popleft()  # the one that has rested longest: most likely nobody has to wait for it
        alike = [b for b in self._buckets if (b.dtype, b.device) == (bucket.dtype, bucket.device)]
        numel = max(b.numel if purpose == "to send" else b.own * self._plan.peers for b in alike)
        return Buffer(torch.empty(numel, dtype=bucket.dtype, device=bucket.device))

    def _recycle(self, purpose: str, buffer: Buffer) -> None:
        self._spare[purpose, buffer.data.dtype, buffer.data.device].append(buffer)

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Copy one gradient of one parameter, before any reduction; may start exchanges."""
        filling = self._filling_of(param)
        if param in filling.held:
            self._hold(filling, param, _value(grad))
        else:
            self._copy(filling, param, _value(grad))
        self._launch_ready()

    def take(self, param: Tensor, grad: Tensor) -> None:
        """As :meth:`add`, but ``grad`` is ours from now on: nobody writes to it any more, and nothing is copied yet."""
        filling = self._filling_of(param)
        if param in filling.copied:
            self._copy(filling, param, _value(grad))
        else:
            self._hold(filling, param, _value(grad))
        self._launch_ready()

    def _filling_of(self, param: Tensor) -> _Filling:
        self._prepare()
        index = self._bucket_of[param]
        if index < self._next:
            raise RuntimeError(
                f"the gradient of '{self._name_of[param]}' arrived twice in one backward pass, the second time after "
                "its exchange. This is what a weight shared between reentrant checkpoint segments does: set "
                "use_reentrant=False in the activation checkpointing, or gamma=1.0 for its param group."
            )
        filling = self._filling.get(index)
        if filling is None:
            filling = self._filling[index] = _Filling()
        return filling

    def _hold(self, filling: _Filling, param: Tensor, grad: Tensor) -> None:
        first = filling.held.get(param)
        if first is not None:
            self._lanes.gather(filling.producers, (first,))
            grad = first + grad
        filling.held[param] = grad
        filling.producers.add(self._lanes.here())

    def _copy(self, filling: _Filling, param: Tensor, grad: Tensor) -> None:
        bucket = self._buckets[self._bucket_of[param]]
        again = param in filling.copied
        if filling.buffer is None:
            filling.buffer = self._buffer("to send", bucket)
        here = self._lanes.here()
        if here not in filling.writers:
            self._lanes.wait(filling.buffer.free)
            filling.writers.add(here)
        if again:
            self._lanes.gather(filling.writers, ())
        filling.buffer.copy(bucket, {param: grad}, accumulate=again)
        filling.copied.add(param)

    def _launch_ready(self) -> None:
        while self._eager and self._next in self._filling:
            filling = self._filling[self._next]
            if len(filling.copied) + len(filling.held) < len(self._buckets[self._next].routes):
                break
            self._launch()

    def _launch(self) -> None:
        """Send the next bucket; gradients that never came are zeros."""
        bucket = self._buckets[self._next]
        filling = self._filling.pop(self._next, None) or _Filling()
        sent = filling.buffer or self._buffer("to send", bucket)
        self._lanes.wait(sent.free)
        self._lanes.gather(filling.producers, filling.held.values())
        sent.copy(bucket, filling.held)
        if self._norms is not None:
            self._norms.note(self._micro_batches, filling.held.items())
        came = filling.copied | filling.held.keys()
        sent.complete(bucket, [route.param for route in bucket.routes if route.param not in came])
        self._sink.open(bucket)
        self._lanes.fork(filling.writers)
        self._next += 1
        with self._lanes.side():
            if self._norms is not None and filling.copied:
                places = sent.views(bucket).places
                copied = [r.param for r in bucket.routes if r.param in filling.copied]
                self._norms.note(self._micro_batches, [(p, view) for p in copied for view in places[p].views])
            while len(self._flights) >= self._in_flight:
                self._land()
            self._flights.append(self._send(bucket, sent))

    def _send(self, bucket: Bucket, sent: Buffer) -> _Flight:
        if self._plan.peers == 1:
            return _Flight(bucket, sent, sent, None)
        received = self._buffer("to receive", bucket)
        work = torch.distributed.all_to_all_single(
            received.data[: bucket.own * self._plan.peers],
            sent.data[: bucket.numel],
            output_split_sizes=[bucket.own] * self._plan.peers,
            input_split_sizes=bucket.splits,
            group=self._plan.group,
            async_op=True,
        )
        return _Flight(bucket, sent, received, work)

    def _land(self) -> None:
        """Wait for the oldest exchange and merge what it brought."""
        flight = self._flights.popleft()
        bucket, sent, received = flight.bucket, flight.sent, flight.received
        if flight.work is not None:
            flight.work.wait()
            sent.free = self._lanes.mark(sent.free)
        if bucket.own:
            rows = received.data[: bucket.own * self._plan.peers].view(self._plan.peers, bucket.own)
            if self._sequences is not None:
                rows = self._sequences.join(rows, self._rows)
            self._sink.merge(bucket, rows, self._micro_batches)
        if flight.work is None:
            sent.free = self._lanes.mark(sent.free)
        else:
            self._recycle("to receive", received)
        self._recycle("to send", sent)

    def end_micro_batch(self) -> None:
        """Close the micro-batch: send what has not left yet, and have everything merged."""
        self._prepare()  # other ranks may have gradients to send
        while self._next < len(self._buckets):
            self._launch()
        with self._lanes.side():
            while self._flights:
                self._land()
        self._next = 0
        self._micro_batches += 1

    def finish(self) -> int:
        """k, the number of chunks in this window; a collective, with ``nodes``, after every further micro-batch."""
        if self._finished < self._micro_batches:
            self._sink.finish(self._micro_batches)
            self._finished = self._micro_batches
        self._lanes.join()
        return self._micro_batches * self._plan.ranks // (1 if self._sequences is None else self._sequences.size)

    def moments(self, shard: Tensor) -> Moments:
        """Over all k chunks, laid out as ``shard`` is; 0 in its padding. After :meth:`finish`.

        The tensors are on ``shard``'s device. They are the window's own, which callers must not write to, until
        :meth:`reset`; copies where the gradients are on another device.
        """
        if self._nodes is not None and self._finished < self._micro_batches:
            raise RuntimeError("the nodes have not merged their moments yet: finish() comes before moments()")
        self._lanes.join()  # a reader in the middle of a window has not been through finish()
        held = self._store.of(shard) if self._micro_batches else None
        if held is None:
            zeros = torch.zeros_like(shard, dtype=torch.promote_types(shard.dtype, torch.float32))
            return Moments(zeros, zeros.clone(), max(self._micro_batches, 1))
        for moment in held:
            self._lanes.use(moment)
        total, m2 = (beside(shard, moment) for moment in held)
        return Moments(total, m2, self._micro_batches)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held now, outside a micro-batch: of moments, and of the buffers to send and to receive."""
        return self._sink.nbytes(), sum(buffer.data.nbytes for spare in self._spare.values() for buffer in spare)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends to others: in a micro-batch, and once a window."""
        me = self._plan.me
        sent = sum((bucket.numel - bucket.splits[me]) * bucket.dtype.itemsize for bucket in self._buckets)
        return sent, self._sink.sent_bytes()

    def reset(self) -> None:
        """Begin the next window, also after a backward pass that was broken off half-way."""
        self._lanes.join()
        for filling in self._filling.values():
            if filling.buffer is not None:
                self._recycle("to send", filling.buffer)
        self._filling.clear()
        self._flights.clear()  # with their buffers: nobody knows whether the other ranks have sent theirs
        self._sink.close()
        if self._norms is not None:
            self._norms.clear()
        self._next = 0
        self._micro_batches = 0
        self._finished = 0
