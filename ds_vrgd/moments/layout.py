"""Which elements of an optimizer's tensor belong to which layer.

Under ZeRO an optimizer is handed flat shards: the end of one parameter, some whole ones, the beginning
of another, padding. A *layer* is one parameter tensor, whole, wherever its elements are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Sums over a layer and over ranks: a few numbers per layer, so the widest type costs nothing.
SUM_DTYPE = torch.float64


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has a part: FSDP2, PyTorch's tensor parallelism."""
    return hasattr(type(tensor), "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory, outside the graph; any other tensor as it is.

    ``to_local()`` takes ten times as long, and a step asks for a part some six times a parameter.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def local_gradient(tensor: Tensor) -> Tensor:
    """Return this rank's part of ``tensor.grad``, and lay that out as the tensor is: a collective where it is not.

    With sequence parallelism each rank has a summand of the gradient of a weight that it holds whole.
    """
    grad: Any = tensor.grad
    if is_dtensor(grad) and grad.placements != tensor.placements:  # type: ignore[attr-defined]
        tensor.grad = grad = grad.redistribute(placements=tensor.placements)  # type: ignore[attr-defined]
    return local(grad)


@dataclass(frozen=True)
class Layer:
    """One parameter tensor."""

    name: str  # the parameter's
    numel: int  # its elements, on all ranks together
    # Process groups over which its elements are cut; summed over each of them in turn, the ranks' parts make the layer
    # (ZeRO's data-parallel group; for a split weight, also the tensor-parallel one). Empty where every rank has it all.
    groups: tuple[Any, ...] = ()
    counted: bool = True  # in a sum over the whole model; False for a copy that another model-parallel rank counts
    # Micro-batches that make one of this layer's chunks together: those of the expert-parallel ranks, whose tokens an
    # expert has seen before anybody sees its gradient; 1 for every other layer.
    share: int = 1


@dataclass(frozen=True)
class Segment:
    """A run of one layer's elements inside a shard: ``shard[start : start + numel]``."""

    layer: int  # index in the shard's layers
    start: int
    numel: int
    first: int = 0  # the index of its first element in the flattened layer


@dataclass(frozen=True)
class ShardLayout:
    """The layers in a shard. Between and after its segments is padding: perhaps uninitialised memory, never read."""

    layers: tuple[Layer, ...]  # all that any rank's piece of this shard holds, in the same order on all ranks
    segments: tuple[Segment, ...]  # this rank's runs, by ascending start, at most one per layer
    numel: int  # elements of the shard, padding included

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            if segment.start < end or segment.numel <= 0 or not 0 <= segment.layer < len(self.layers):
                raise ValueError(f"segment {segment} overlaps its neighbour or names no layer of this shard")
            end = segment.start + segment.numel
        if len({segment.layer for segment in self.segments}) != len(self.segments):
            raise ValueError("a layer has two segments in one shard")
        if end > self.numel:
            raise ValueError(f"segments end at {end}, after the last of the shard's {self.numel} elements")

    @classmethod
    def of(cls, name: str, param: Tensor) -> ShardLayout:
        """Return the layout of a parameter: one layer, undivided, or this rank's part of a DTensor."""
        if not is_dtensor(param):
            return cls.part(Layer(name, param.numel()), param.numel())
        dtensor: Any = param
        cuts = [dim for dim, placement in enumerate(dtensor.placements) if not placement.is_replicate()]
        layer = Layer(name, param.numel(), tuple(dtensor.device_mesh.get_group(dim) for dim in cuts))
        first = 0
        if len(cuts) == 1 and dtensor.placements[cuts[0]].is_shard(0):
            rows = -(-len(param) // dtensor.device_mesh.size(cuts[0]))
            first = dtensor.device_mesh.get_local_rank(cuts[0]) * rows * (param.numel() // max(len(param), 1))
        return cls.part(layer, local(param).numel(), first)

    @classmethod
    def part(cls, layer: Layer, numel: int, first: int = 0) -> ShardLayout:
        """Return the layout of a tensor that holds ``numel`` elements of one layer from ``first`` on, and no more."""
        return cls((layer,), (Segment(0, 0, numel, first),) if numel else (), numel)

    @cached_property
    def share(self) -> int:
        """Return how many micro-batches make one chunk of these layers: the same for all layers of a shard."""
        return self.layers[0].share if self.layers else 1


class LayerTable:
    """The layers of several shards in one list, so that one all-reduce serves them all.

    Args:
        layouts: of the shards that one optimizer call updates, in the order of the call.
        device: where the shards are.

    Attributes:
        layers, names: of all shards, ``L`` of them.
        numels: ``(L,)``, elements of each layer on all ranks together.
        shares: ``(L,)``, micro-batches that make one of each layer's chunks together.
        cuts: by process group, in the order of the layers: which layers are cut over it, ``(at most L,)`` int64; None
            for all of them.
    """

    def __init__(self, layouts: Sequence[ShardLayout], device: torch.device) -> None:
        self.layouts = tuple(layouts)
        self.layers = layers = [layer for layout in self.layouts for layer in layout.layers]
        self.names = [layer.name for layer in layers]
        self.numels = torch.tensor([layer.numel for layer in layers], dtype=SUM_DTYPE, device=device)
        self.shares = torch.tensor([layer.share for layer in layers], dtype=SUM_DTYPE, device=device)
        self.cuts: dict[Any, Tensor | None] = {}
        for group in dict.fromkeys(group for layer in layers for group in layer.groups):
            cut = [index for index, layer in enumerate(layers) if group in layer.groups]
            self.cuts[group] = None if len(cut) == len(layers) else torch.tensor(cut, device=device)

    @cached_property
    def segments(self) -> list[list[tuple[int, int, int, int]]]:
        """Return the runs ``(start, numel, layer, first)`` of each shard; layers are counted as in the columns."""
        found, before = [], 0
        for layout in self.layouts:
            found.append([(s.start, s.numel, before + s.layer, s.first) for s in layout.segments])
            before += len(layout.layers)
        return found


@dataclass(frozen=True)
class Ranks:
    """The ranks that step together.

    Attributes:
        device: where they can communicate; None where the tensors' own device will do.
    """

    device: torch.device | None = None

    def sum(self, columns: Sequence[tuple[LayerTable, Tensor]]) -> list[Tensor]:
        """Return sums over whole layers: the entries of each column summed over the groups of their layers.

        A collective: every rank of these groups calls it, with the same layers in the same order. One all-reduce per
        group, so that there is one where all layers are cut over one group.

        Args:
            columns: ``(L,)`` each, of one dtype and device, and the table of the layers that they belong to.
        """
        totals = [column for _, column in columns]
        for group in dict.fromkeys(group for table, _ in columns for group in table.cuts):
            cut = [(column, table.cuts[group]) for column, (table, _) in enumerate(columns) if group in table.cuts]
            parts = [totals[column] if index is None else totals[column][index] for column, index in cut]
            joined = torch.cat(parts)
            travelling = joined.to(self.device or joined.device)
            torch.distributed.all_reduce(travelling, group=group)
            summed = travelling.to(joined.device).split([len(part) for part in parts])
            for (column, index), part in zip(cut, summed, strict=True):
                totals[column] = part if index is None else totals[column].index_copy(0, index, part)
        return totals
