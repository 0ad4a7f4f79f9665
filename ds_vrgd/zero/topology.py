"""Which ranks share a node."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch


def ranks_per_node(
    wanted: int | None, device: torch.device, group: Any, together: Iterable[tuple[int, ...]] = ()
) -> int:
    """Data-parallel ranks that share a node; a collective of all ranks.

    Args:
        wanted: the optimizer's argument; None to go by the launcher (LOCAL_WORLD_SIZE from torchrun, LOCAL_SIZE from
            DeepSpeed's).
        device: where the ranks can talk to each other.
        group: process group of the data-parallel ranks: some of those on a node, where the model is cut, too.
        together: numbers in ``group`` of ranks that must not be on different nodes, because they share their chunks.

    Returns:
        ``wanted`` if it is given. The size of ``group``, so that there is one level, where the launcher says nothing,
        where the nodes are not equal, or where they would part what is ``together``.

    Raises:
        ValueError: ``wanted`` differs between the ranks.
    """
    world, size = torch.distributed.get_world_size(), torch.distributed.get_world_size(group)
    told = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world)
    nodes = [rank // told for rank in torch.distributed.get_process_group_ranks(group)]
    own = nodes.count(nodes[0])
    in_a_row = world % told == 0 and nodes == sorted(nodes) and {nodes.count(node) for node in nodes} == {own}
    whole = all(len({number // own for number in ranks}) == 1 for ranks in together)
    here = wanted or (own if in_a_row and whole else size)
    extremes = torch.tensor([here, -here], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    most, minus_least = extremes.tolist()
    if most == -minus_least:
        return here
    if wanted:
        raise ValueError(f"ranks_per_node is {-minus_least} on one rank and {most} on another: give all the same")
    return size
