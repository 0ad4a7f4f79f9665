"""Two levels: gradients travel inside a node, and once a window the moments travel between the nodes.

Local rank j of a node receives, from the ranks of its node, the gradients of everything that the ranks with local index
j own, on all nodes: its *column*. At the end of the window these ranks hand each other the moments of what they own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.buckets import Bucket
from ds_vrgd.moments.chan import merge_chunks_
from ds_vrgd.moments.lanes import Lanes
from ds_vrgd.moments.route import Plan
from ds_vrgd.moments.store import ShardStore

# Buckets whose moments are between the nodes at once.
IN_FLIGHT = 2


@dataclass(frozen=True)
class NodeGroups:
    """Process groups of this rank.

    Attributes:
        local: the ranks of its node, consecutive data-parallel ranks.
        across: the ranks of equal local index, one a node, in node order.
        nodes, per_node: how many there are, and ranks in each.
        rank: among the data-parallel ranks.
    """

    local: Any
    across: Any
    nodes: int
    per_node: int
    rank: int

    @classmethod
    def build(cls, group: Any, ranks_per_node: int) -> NodeGroups | None:
        """Cut ``group`` into nodes; a collective of all ranks that there are, in ``group`` or in one like it.

        Args:
            group: process group of the data-parallel ranks.
            ranks_per_node: so many consecutive ranks make a node.

        Returns:
            None where two levels are one: a single node, or one rank a node.

        Raises:
            ValueError: the ranks cannot be cut into nodes of that size.
        """
        size = torch.distributed.get_world_size(group)
        if ranks_per_node < 1 or size % ranks_per_node:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"ranks_per_node={ranks_per_node} does not divide the {size} data-parallel ranks into equal nodes. "
                f"Set it to one of {divisors}; {size} exchanges the gradients among all ranks at once."
            )
        if not 1 < ranks_per_node < size:
            return None
        # Every rank makes every group, also those of other data-parallel groups (model parallelism), in one order.
        ours = tuple(torch.distributed.get_process_group_ranks(group))
        if list(ours) != sorted(ours):
            raise ValueError(
                f"the data-parallel ranks {list(ours)} are not in ascending order, the only one in which torch makes "
                f"groups of nodes. Make their group without sort_ranks=False, or set ranks_per_node={size}."
            )
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, ours)
        found = None
        for ranks in sorted(set(everyone)):
            starts = range(0, size, ranks_per_node)
            local = [torch.distributed.new_group(ranks[i : i + ranks_per_node]) for i in starts]
            across = [torch.distributed.new_group(ranks[j::ranks_per_node]) for j in range(ranks_per_node)]
            if ranks == ours:
                rank = torch.distributed.get_rank(group)
                node, index = divmod(rank, ranks_per_node)
                found = cls(local[node], across[index], size // ranks_per_node, ranks_per_node, rank)
        return found

    def plan(self) -> Plan:
        """Every rank sends the local rank j what column j owns."""
        order = tuple(node * self.per_node + j for j in range(self.per_node) for node in range(self.nodes))
        return Plan(self.local, self.per_node, self.rank % self.per_node, self.rank, order)


@dataclass
class _Flight:
    """A bucket's moments on their way between the nodes: ``(nodes, own)`` each."""

    bucket: Bucket
    totals: Tensor
    m2s: Tensor
    works: list[Any]


class NodeMoments:
    """Moments of the node's chunks on this rank's column, merged over the nodes into its shards.

    Memory: 8 bytes an element of the column while a window is open; in :meth:`finish`, those of the shards, and the
    regions of two buckets once a node.

    Args:
        buckets: all there are.
        groups: of this rank.
        store: of the shards.
        lanes: the side stream is where everything runs.
        chunks: of a micro-batch on one node.
    """

    def __init__(
        self, buckets: Sequence[Bucket], groups: NodeGroups, store: ShardStore, lanes: Lanes, chunks: int
    ) -> None:
        self._buckets = buckets
        self._groups = groups
        self._chunks = chunks
        self._store = store
        self._lanes = lanes
        self._columns: dict[Bucket, tuple[Tensor, Tensor]] = {}

    def open(self, bucket: Bucket) -> None:
        """Have memory for the column of ``bucket``."""
        if bucket not in self._columns:
            dtype = torch.promote_types(bucket.dtype, torch.float32)
            total, m2 = (torch.empty(bucket.own, dtype=dtype, device=bucket.device) for _ in range(2))
            self._columns[bucket] = total, m2

    def merge(self, bucket: Bucket, received: Tensor, parts: int) -> None:
        """Merge one micro-batch of the node's chunk gradients, ``(chunks, own)``."""
        merge_chunks_(received, *self._columns[bucket], parts)

    def finish(self, parts: int) -> None:
        """Merge the nodes' moments over ``parts`` micro-batches into the shards, on the side stream; a collective."""
        for bucket in self._buckets:
            self._store.open(bucket)
        self._lanes.fork(())
        with self._lanes.side():
            flights: deque[_Flight] = deque()
            for bucket in self._buckets:
                if len(flights) == IN_FLIGHT:
                    self._land(flights.popleft(), parts)
                flights.append(self._launch(bucket))
            while flights:
                self._land(flights.popleft(), parts)

    def _column(self, bucket: Bucket) -> list[int]:
        """Elements that each node's rank of this column owns."""
        return bucket.regions[self._groups.rank % self._groups.per_node :: self._groups.per_node]

    def _launch(self, bucket: Bucket) -> _Flight:
        nodes = self._groups.nodes
        column, own = self._column(bucket), bucket.regions[self._groups.rank]
        moments = self._columns[bucket]
        totals, m2s = (moment.new_empty(nodes, own) for moment in moments)
        works = [
            torch.distributed.all_to_all_single(
                received.view(-1), moment, [own] * nodes, column, group=self._groups.across, async_op=True
            )
            for received, moment in zip((totals, m2s), moments, strict=True)
        ]
        return _Flight(bucket, totals, m2s, works)

    def _land(self, flight: _Flight, parts: int) -> None:
        for work in flight.works:
            work.wait()
        for piece in flight.bucket.pieces:
            end = piece.start + piece.numel
            received = flight.totals[:, piece.start : end], flight.m2s[:, piece.start : end]
            merge_nodes_(*received, *self._store.views(piece), parts, self._chunks)

    def nbytes(self) -> int:
        """Bytes held now."""
        return self._store.nbytes() + sum(moment.nbytes for column in self._columns.values() for moment in column)

    def sent_bytes(self) -> int:
        """Bytes that :meth:`finish` sends to other nodes: two moments of what they own."""
        sent = 0
        for bucket in self._buckets:
            elements = sum(self._column(bucket)) - bucket.regions[self._groups.rank]
            sent += 2 * elements * torch.promote_types(bucket.dtype, torch.float32).itemsize
        return sent

    def close(self) -> None:
        """Let go of all memory."""
        self._columns.clear()
        self._store.close()


def merge_nodes_(totals: Tensor, m2s: Tensor, total: Tensor, m2: Tensor, parts: int, chunks: int) -> None:
    """Chan's formula for nodes of equally many chunks, in node order, so that every run gives the same bits.

    Args:
        totals, m2s: ``(nodes, n)``, of each node's ``parts * chunks`` chunks: ``parts`` times their mean, and their
            centred sum of squares.
        total, m2: ``(n,)``, overwritten with those of all chunks.
        parts: micro-batches.
        chunks: of a micro-batch on one node.
    """
    total.copy_(totals[0])
    for row in totals[1:]:
        total.add_(row)
    total.div_(len(totals))
    m2.copy_(m2s[0])
    for row in m2s[1:]:
        m2.add_(row)
    for row in totals:
        # The deviation of a mean is that of a total over parts, and there are parts * chunks of them behind it.
        deviation = row - total
        m2.addcmul_(deviation, deviation, value=chunks / parts)
