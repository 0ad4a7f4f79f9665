"""Sequence parallelism: the gradient of one chunk lies in parts on the ranks that share its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceGroups:
    """Which ranks share the samples of a micro-batch, each with a part of every sequence (DeepSpeed Ulysses).

    A chunk is a micro-batch of whole samples: its gradient is the sum of what these ranks compute, and is summed in
    fp32 before anything is squared.

    Attributes:
        group: process group of the ranks that share this rank's samples.
        members: of every such group the numbers of its ranks among those that exchange gradients, in the order in which
            they are summed; all of one size.
        divisor: what the sum is then divided by: at stage 3 their size, for that is DeepSpeed's mean there.
    """

    group: Any
    members: tuple[tuple[int, ...], ...]
    divisor: int = 1

    @property
    def size(self) -> int:
        """Ranks that share samples."""
        return len(self.members[0])

    def rows(self, peers: Sequence[int]) -> list[tuple[int, ...]]:
        """Which of the rows that ``peers`` send belong to one chunk: one tuple a chunk.

        Args:
            peers: numbers of the ranks that exchange gradients, by row.

        Raises:
            ValueError: a group is among them in part.
        """
        place = {rank: row for row, rank in enumerate(peers)}
        rows = []
        for members in self.members:
            inside = [rank in place for rank in members]
            if any(inside) and not all(inside):
                raise ValueError(
                    f"the ranks {list(members)} share their sequences and are not on one node of {len(peers)} ranks, "
                    "so that no chunk is whole there. Set ranks_per_node to a multiple of the sequence-parallel size "
                    f"{self.size}, or to the number of all ranks"
                )
            if all(inside):
                rows.append(tuple(place[rank] for rank in members))
        return rows

    def join(self, received: Tensor, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """The gradients of whole chunks.

        Args:
            received: ``(ranks, n)``, any floating dtype: what each rank has computed.
            rows: of each chunk, as :meth:`rows` gives them.

        Returns:
            ``(chunks, n)`` in fp32 (fp64 for fp64).
        """
        dtype = torch.promote_types(received.dtype, torch.float32)
        joined = torch.empty(len(rows), received.shape[1], dtype=dtype, device=received.device)
        for chunk, (first, *others) in zip(joined, rows, strict=True):
            chunk.copy_(received[first])
            for row in others:
                chunk.add_(received[row])
        return joined.div_(self.divisor) if self.divisor > 1 else joined
