"""One model's parameters as ZeRO cuts them among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.bert import Network
from benchmarks.ranks import Rank
from ds_vrgd.engines.deepspeed.exchanges import LARGEST_BUCKET
from ds_vrgd.moments import Layer, Route, Segment, ShardedMoments, ShardLayout

#: Who owns which elements: stages 1 and 2, the same with ``round_robin_gradients``, stage 3.
FLAT, DEALT, SLICED = "flat", "round robin", "sliced"
OWNERSHIPS = (FLAT, DEALT, SLICED)


def layers_of(network: Network) -> list[Layer]:
    """Return its parameters, in the model's order."""
    return [Layer(name, param.numel()) for name, param in network.parameters()]


def shard_size(layers: Sequence[Layer], ranks: int) -> int:
    """Return the elements of each rank's shard; the last one's may be padded."""
    return -(-sum(layer.numel for layer in layers) // ranks)


def shard_layout(layers: Sequence[Layer], rank: int, ranks: int) -> ShardLayout:
    """Return the layout of one rank's shard."""
    size = shard_size(layers, ranks)
    segments, offset = [], 0
    for index, layer in enumerate(layers):
        begin, end = max(offset, rank * size), min(offset + layer.numel, (rank + 1) * size)
        if begin < end:
            segments.append(Segment(index, begin - rank * size, end - begin, begin - offset))
        offset += layer.numel
    return ShardLayout(tuple(layers), tuple(segments), size)


def flat_routes(layers: Sequence[Layer], shard: Tensor, rank: int, wire: torch.dtype) -> list[Route]:
    """Return the elements' owners if the layers are laid end to end, and cut into one shard per rank."""
    found, offset = [], 0
    for place, layer in enumerate(layers):
        runs, position = [], offset
        while position < offset + layer.numel:
            owner = position // shard.numel()
            end = min(offset + layer.numel, (owner + 1) * shard.numel())
            runs.append((owner, end - position))
            position = end
        start = max(offset - rank * shard.numel(), 0)
        found.append(Route(_parameter(shard, wire), layer.name, layer.numel, tuple(runs), shard, start, place=place))
        offset += layer.numel
    return found


def sliced_routes(layers: Sequence[Layer], shard: Tensor, ranks: int, wire: torch.dtype) -> list[Route]:
    """Return the elements' owners if every layer is cut into equal slots, one per rank, as at stage 3."""
    found, start = [], 0
    for place, layer in enumerate(layers):
        slot = -(-layer.numel // ranks)
        runs = tuple((rank, min(slot, layer.numel - rank * slot)) for rank in range(-(-layer.numel // slot)))
        param = _parameter(shard, wire)
        found.append(Route(param, layer.name, layer.numel, runs, shard, start, slot=slot, place=place))
        start += slot
    return found


def _parameter(shard: Tensor, wire: torch.dtype) -> Tensor:
    """Return an empty parameter: its elements are never read."""
    return torch.empty(0, dtype=wire, device=shard.device)


def dealt(layers: Sequence[Layer], ranks: int) -> list[Layer]:
    """Return them in the order of ``round_robin_gradients``: the first rank's, the second's, and so on."""
    return [layer for first in range(ranks) for layer in layers[first::ranks]]


def routes_of(network: Network, ownership: str, rank: Rank, wire: torch.dtype) -> list[Route]:
    """Return the routes in the model's order; at stages 1 and 2 matrices and vectors are param groups of their own.

    Args:
        network: whose parameters.
        ownership: a name in :data:`OWNERSHIPS`.
        rank: this one.
        wire: dtype of the gradients.
    """
    layers = layers_of(network)
    if ownership == SLICED:
        shard = torch.zeros(sum(-(-layer.numel // rank.count) for layer in layers), device=rank.device)
        return sliced_routes(layers, shard, rank.count, wire)
    matrices = {name for name, param in network.parameters() if param.dim() > 1}
    routes = {}
    for group in ([layer for layer in layers if (layer.name in matrices) is wanted] for wanted in (True, False)):
        order = dealt(group, rank.count) if ownership == DEALT else group
        shard = torch.zeros(shard_size(group, rank.count), device=rank.device)
        for route in flat_routes(order, shard, rank.index, wire):
            routes[route.name] = replace(route, place=len(routes))
    return [routes[layer.name] for layer in layers]


def exchange(network: Network, ownership: str, rank: Rank, wire: torch.dtype) -> Callable[[], Any]:
    """A call that does what fused mode does: every gradient to its owner, and the moments there."""
    # Gradients come in about the reverse of the model's order.
    order = routes_of(network, ownership, rank, wire)[::-1]
    moments = ShardedMoments(order, torch.distributed.group.WORLD, LARGEST_BUCKET)
    gradients = [torch.zeros(route.numel, dtype=wire, device=rank.device) for route in order]

    def run() -> None:
        for route, gradient in zip(order, gradients, strict=True):
            moments.add(route.param, gradient, keep=True)
        moments.end_micro_batch()
        moments.reset()

    return run
