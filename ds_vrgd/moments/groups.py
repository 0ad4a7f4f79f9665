"""The ranks that exchange gradients with each other, and those that compute one chunk together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def gathered(own: T, group: Any | None) -> list[T]:
    """Return what each rank of a group (None: a single process) has, by rank; a collective of what can be pickled."""
    if group is None:
        return [own]
    everyone = [own] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, own, group=group)
    return everyone


@dataclass(frozen=True)
class NodeGroups:
    """The process groups of this rank for two levels: gradients travel in a node, and moments between the nodes.

    Every rank sends the local rank j of its node the gradients of what column j owns: the ranks of that local index.
    """

    local: Any  # the ranks of its node, consecutive data-parallel ranks: its peers
    across: Any  # the ranks of equal local index, one per node, in node order
    nodes: int
    per_node: int  # ranks in each node
    rank: int  # its number among the data-parallel ranks

    @classmethod
    def single(cls, group: Any) -> NodeGroups:
        """Return one level: a single node, in which every rank of ``group`` sends its gradients to every other one."""
        return cls(group, None, 1, torch.distributed.get_world_size(group), torch.distributed.get_rank(group))

    @property
    def ranks(self) -> int:
        """Return the number of all data-parallel ranks."""
        return self.nodes * self.per_node

    @property
    def index(self) -> int:
        """Return this rank's number in its node, which is that of its column."""
        return self.rank % self.per_node

    @property
    def order(self) -> list[int]:
        """Return the data-parallel ranks by column, and in a column by node."""
        return [node * self.per_node + index for index in range(self.per_node) for node in range(self.nodes)]

    @classmethod
    def build(cls, group: Any, ranks_per_node: int) -> NodeGroups | None:
        """Cut ``group`` into nodes. A collective of all ranks that there are, each in ``group`` or in one like it.

        Args:
            group: process group of the data-parallel ranks.
            ranks_per_node: the number of consecutive ranks that make a node.

        Returns:
            None where two levels are one: a single node, or one rank per node.

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
        found = None
        for ranks in sorted(set(gathered(ours, torch.distributed.group.WORLD))):
            starts = range(0, size, ranks_per_node)
            local = [torch.distributed.new_group(ranks[i : i + ranks_per_node]) for i in starts]
            across = [torch.distributed.new_group(ranks[j::ranks_per_node]) for j in range(ranks_per_node)]
            if ranks == ours:
                rank = torch.distributed.get_rank(group)
                node, index = divmod(rank, ranks_per_node)
                found = cls(local[node], across[index], size // ranks_per_node, ranks_per_node, rank)
        return found


@dataclass(frozen=True)
class SequenceGroups:
    """The ranks that share the samples of a micro-batch, each with a part of every sequence (DeepSpeed Ulysses).

    A chunk is a micro-batch of whole samples: its gradient is the sum of what these ranks compute, and is summed in
    fp32 before anything is squared.
    """

    group: Any  # process group of the ranks that share this rank's samples
    # For every such group, the numbers of its ranks among those that exchange gradients, in the order of the sum.
    members: tuple[tuple[int, ...], ...]  # all of one size
    divisor: int = 1  # divides the sum: at stage 3 the size, because DeepSpeed takes the mean there

    @property
    def size(self) -> int:
        """Return the number of ranks that share samples."""
        return len(self.members[0])

    def rows(self, peers: Sequence[int]) -> list[tuple[int, ...]]:
        """Return which of the rows that ``peers`` (numbers of ranks, by row) send belong to one chunk, for each chunk.

        Raises:
            ValueError: only a part of a group is among them.
        """
        row_of = {rank: row for row, rank in enumerate(peers)}
        rows = []
        for members in self.members:
            inside = [row_of[rank] for rank in members if rank in row_of]
            if inside and len(inside) < len(members):
                raise ValueError(
                    f"the ranks {list(members)} share their sequences and are not on one node of {len(peers)} ranks, "
                    "so that no chunk is whole there. Set ranks_per_node to a multiple of the sequence-parallel size "
                    f"{self.size}, or to the number of all ranks"
                )
            if inside:
                rows.append(tuple(inside))
        return rows

    def join(self, received: Tensor, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the gradients of whole chunks, ``(chunks, n)`` in fp32 (fp64 for fp64).

        Args:
            received: ``(ranks, n)``, any floating dtype: what each rank has computed.
            rows: of each chunk, from :meth:`rows`.
        """
        dtype = torch.promote_types(received.dtype, torch.float32)
        joined = torch.empty(len(rows), received.shape[1], dtype=dtype, device=received.device)
        for chunk, (first, *others) in zip(joined, rows, strict=True):
            chunk.copy_(received[first])
            for row in others:
                chunk.add_(received[row])
        return joined.div_(self.divisor) if self.divisor > 1 else joined
