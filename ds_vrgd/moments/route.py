"""Which rank owns which element, and the way that a gradient takes to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Route:
    """Where the elements of one parameter are owned.

    Attributes:
        param: the parameter whose gradient is observed.
        name: its name, for messages.
        numel: its elements, on all ranks together.
        runs: ``(rank, elements)`` of consecutive runs of the flattened parameter, by ascending rank.
        shard: this rank's optimizer tensor that holds its run.
        shard_start: where its run begins in ``shard``; meaningless if it has none. With ``slot``, where its slot
            begins, also if the slot is empty.
        slot: elements that the exchange and the shard reserve for the run on *every* rank (ZeRO-3 cuts each parameter
            into equal slots); None where they reserve exactly the runs.
        place: index among all routes in the order of the shards and of their elements, the same on all ranks.
            Neighbours in a shard that travel side by side are merged in one piece; it changes no value.
    """

    param: Tensor
    name: str
    numel: int
    runs: tuple[tuple[int, int], ...]
    shard: Tensor
    shard_start: int
    slot: int | None = None
    place: int = 0

    def reserved(self, ranks: int) -> list[int]:
        """Elements that the exchange reserves for each rank."""
        if self.slot is not None:
            return [self.slot] * ranks
        runs = dict(self.runs)
        return [runs.get(rank, 0) for rank in range(ranks)]


@dataclass(frozen=True)
class Plan:
    """Among whom gradients travel.

    Attributes:
        group: process group of the peers.
        peers: ranks in ``group``.
        me: this rank's number in ``group``.
        rank: this rank's number among all data-parallel ranks.
        order: data-parallel ranks, by the peer that is sent what they own: as many for each peer.
    """

    group: Any
    peers: int
    me: int
    rank: int
    order: tuple[int, ...]

    @classmethod
    def direct(cls, group: Any) -> Plan:
        """Every rank of ``group`` sends every other one what that owns."""
        rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        return cls(group, ranks, rank, rank, tuple(range(ranks)))

    @property
    def ranks(self) -> int:
        """All data-parallel ranks."""
        return len(self.order)

    @property
    def peer_ranks(self) -> list[int]:
        """Numbers of the peers among all data-parallel ranks, by peer."""
        return [self.rank - self.me + peer for peer in range(self.peers)]  # of all, or of a node: consecutive

    @property
    def share(self) -> int:
        """Ranks whose elements one peer is sent."""
        return self.ranks // self.peers
