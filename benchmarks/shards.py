"""One model's parameters as ZeRO-1 and -2 cut them: laid end to end, an equal shard a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.bert import Network
from benchmarks.ranks import Rank
from ds_vrgd.moments import Layer, Route, Segment, ShardedMoments, ShardLayout
from ds_vrgd.zero.observer import LARGEST_BUCKET


def layers_of(network: Network) -> list[Layer]:
    """Its parameters, in the model's order."""
    return [Layer(name, param.numel()) for name, param in network.parameters()]


def shard_size(layers: Sequence[Layer], ranks: int) -> int:
    """Elements of each rank's shard; the last one's may be padded."""
    return -(-sum(layer.numel for layer in layers) // ranks)


def shard_layout(layers: Sequence[Layer], rank: int, ranks: int) -> ShardLayout:
    """What one rank's shard holds."""
    size = shard_size(layers, ranks)
    segments, offset = [], 0
    for index, layer in enumerate(layers):
        begin, end = max(offset, rank * size), min(offset + layer.numel, (rank + 1) * size)
        if begin < end:
            segments.append(Segment(index, begin - rank * size, end - begin, begin - offset))
        offset += layer.numel
    return ShardLayout(tuple(layers), tuple(segments), size)


def routes(layers: Sequence[Layer], shard: Tensor, rank: int, wire: torch.dtype) -> list[Route]:
    """Where the elements of each layer go; in the model's order."""
    found, offset = [], 0
    for place, layer in enumerate(layers):
        runs, position = [], offset
        while position < offset + layer.numel:
            owner = position // shard.numel()
            end = min(offset + layer.numel, (owner + 1) * shard.numel())
            runs.append((owner, end - position))
            position = end
        start = max(offset - rank * shard.numel(), 0)
        # A parameter's own elements are never read, so that it needs none.
        param = torch.empty(0, dtype=wire, device=shard.device)
        found.append(Route(param, layer.name, layer.numel, tuple(runs), shard, start, place=place))
        offset += layer.numel
    return found


def exchange(network: Network, rank: Rank, wire: torch.dtype) -> Callable[[], Any]:
    """A call that does what fused mode does: every gradient to its owner, and the moments there."""
    layers = layers_of(network)
    shard = torch.zeros(shard_size(layers, rank.count), device=rank.device)
    # Gradients come in about the reverse of the model's order.
    order = routes(layers, shard, rank.index, wire)[::-1]
    moments = ShardedMoments(order, torch.distributed.group.WORLD, LARGEST_BUCKET)
    gradients = [torch.zeros(route.numel, dtype=wire, device=rank.device) for route in order]

    def run() -> None:
        for route, gradient in zip(order, gradients, strict=True):
            moments.take(route.param, gradient)
        moments.end_micro_batch()
        moments.reset()

    return run
