"""Which ranks share a node."""

from __future__ import annotations

import os

import torch


def ranks_per_node(wanted: int | None, device: torch.device) -> int:
    """Ranks that share a node; a collective.

    Args:
        wanted: the optimizer's argument; None to go by the launcher (LOCAL_WORLD_SIZE from torchrun, LOCAL_SIZE from
            DeepSpeed's).
        device: where the ranks can talk to each other.

    Returns:
        ``wanted`` if it is given. The size of the world, so that there is one level, where the launcher says nothing
        or where the nodes are not equal.

    Raises:
        ValueError: ``wanted`` differs between the ranks.
    """
    world = torch.distributed.get_world_size()
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    here = wanted or int(told or world)
    extremes = torch.tensor([here, -here], device=device)
    torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
    most, minus_least = extremes.tolist()
    if most == -minus_least and (wanted or world % here == 0):
        return here
    if wanted:
        raise ValueError(f"ranks_per_node is {-minus_least} on one rank and {most} on another: give all the same")
    return world
