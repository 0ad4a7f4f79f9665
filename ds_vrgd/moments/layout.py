"""Which elements of an optimizer's tensor belong to which layer.

Under ZeRO an optimizer is handed flat shards: the end of one parameter, some whole ones, the beginning
of another, padding. A *layer* is one parameter tensor, whole, wherever its elements live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.kernels.blocks import BlockTable

# Sums over a layer and over ranks: a few numbers a layer, so the widest type costs nothing.
SUM_DTYPE = torch.float64


@dataclass(frozen=True)
class Layer:
    """One parameter tensor.

    Attributes:
        name: the parameter's.
        numel: its elements, on all ranks together.
        groups: process groups over which its elements are cut; summed over each of them in turn, the ranks' parts make
            the layer (ZeRO's data-parallel group; with tensor parallelism, also that group for a split weight). Empty
            where every rank holds it whole.
        counted: whether this rank's part counts in a sum over the whole model; False for a copy of which another
            model-parallel rank counts the twin.
        share: micro-batches that make one of this layer's chunks together: those of the expert-parallel ranks, whose
            tokens an expert has seen before anybody sees its gradient; 1 for every other layer.
    """

    name: str
    numel: int
    groups: tuple[Any, ...] = ()
    counted: bool = True
    share: int = 1


@dataclass(frozen=True)
class Segment:
    """A run of one layer's elements inside a shard: ``shard[start : start + numel]``.

    Attributes:
        layer: index in the shard's layers.
        start, numel: of the run in the shard.
        first: which of the flattened layer's elements comes first in the run.
    """

    layer: int
    start: int
    numel: int
    first: int = 0


@dataclass(frozen=True)
class ShardLayout:
    """What a shard holds.

    Attributes:
        layers: every layer that any rank's piece of this shard holds, in the same order on all ranks.
        segments: this rank's runs, by ascending start, at most one a layer. What lies between and behind
            them is padding: possibly uninitialised memory, and never read.
        numel: elements of the shard, padding included.
    """

    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    numel: int
    _on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        end = 0
        for segment in self.segments:
            if segment.start < end or segment.numel <= 0 or not 0 <= segment.layer < len(self.layers):
                raise ValueError(f"segment {segment} overlaps its neighbour or names no layer of this shard")
            end = segment.start + segment.numel
        if len({segment.layer for segment in self.segments}) != len(self.segments):
            raise ValueError("a layer has two segments in one shard")
        if end > self.numel:
            raise ValueError(f"segments end at {end}, behind the shard's {self.numel} elements")

    @classmethod
    def whole(cls, name: str, numel: int) -> ShardLayout:
        """The layout of a tensor that is one layer, undivided."""
        return cls.part(Layer(name, numel), numel)

    @classmethod
    def part(cls, layer: Layer, numel: int) -> ShardLayout:
        """The layout of a tensor that holds ``numel`` elements of one layer, and nothing else."""
        return cls((layer,), (Segment(0, 0, numel),) if numel else (), numel)

    @property
    def share(self) -> int:
        """Micro-batches that make one chunk of these layers: the same for all layers of a shard."""
        return self.layers[0].share if self.layers else 1

    @cached_property
    def _is_one_layer(self) -> bool:
        return len(self.layers) == 1 and bool(self.segments) and self.segments[0].numel == self.numel

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """(layer, numel) of every run of the shard, padding as layer ``len(self.layers)``."""
        runs, end = [], 0
        for segment in self.segments:
            if segment.start > end:
                runs.append((len(self.layers), segment.start - end))
            runs.append((segment.layer, segment.numel))
            end = segment.start + segment.numel
        if self.numel > end:
            runs.append((len(self.layers), self.numel - end))
        return runs

    def _indices(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Layer of each segment, layer of each run, length of each run: on ``device``, made once."""
        if device not in self._on_device:
            of_segments = torch.tensor([s.layer for s in self.segments], dtype=torch.long, device=device)
            layers, lengths = (
                torch.tensor(column, dtype=torch.long, device=device) for column in zip(*self._runs, strict=True)
            )
            self._on_device[device] = of_segments, layers, lengths
        return self._on_device[device]

    def places(self, device: torch.device) -> Tensor:
        """``(numel,)`` int64: which of its flattened layer's elements each element is; 0 in padding."""
        out = torch.zeros(self.numel, dtype=torch.long, device=device)
        for s in self.segments:
            torch.arange(s.first, s.first + s.numel, out=out[s.start : s.start + s.numel])
        return out

    def sums(self, flat: Tensor, order: int) -> Tensor:
        """This rank's part of each layer's sum of ``|x| ** order``.

        Args:
            flat: ``(numel,)``, shard-shaped.
            order: 1 for the sum (of values that are not negative), 2 for the sum of squares.

        Returns:
            ``(len(layers),)`` in :data:`SUM_DTYPE`, 0 for layers that this rank holds nothing of.
        """
        out = torch.zeros(len(self.layers), dtype=SUM_DTYPE, device=flat.device)
        if self.segments:
            parts = [flat[s.start : s.start + s.numel] for s in self.segments]
            norms = torch.stack(torch._foreach_norm(parts, order, dtype=SUM_DTYPE))
            out[self._indices(flat.device)[0]] = norms.square() if order == 2 else norms
        return out

    def spread(self, values: Tensor, padding: float = 1.0) -> Tensor:
        """One value a layer, laid over the shard's elements.

        Args:
            values: ``(len(layers),)``.
            padding: the value for elements of no layer.

        Returns:
            Broadcastable to ``(numel,)``, of ``values``' dtype.
        """
        if self._is_one_layer:
            return values
        if not self.numel:
            return values[:0]
        _, layers, lengths = self._indices(values.device)
        table = torch.cat([values, values.new_full((1,), padding)])
        return table[layers].repeat_interleave(lengths, output_size=self.numel)


class LayerTable:
    """The layers of several shards side by side, so that one all-reduce serves them all.

    Args:
        layouts: of the shards that one optimizer call updates, in the order of the call.
        device: where the shards are.

    Attributes:
        names: of the layers, ``L`` of them.
        numels: ``(L,)``, elements of each layer on all ranks together.
        shares: ``(L,)``, micro-batches that make one of each layer's chunks together.
        cuts: by process group, in the order of the layers: which layers are cut over it, ``(at most L,)`` int64; None
            for all of them.
    """

    def __init__(self, layouts: Sequence[ShardLayout], device: torch.device) -> None:
        self.layouts = tuple(layouts)
        layers = [layer for layout in self.layouts for layer in layout.layers]
        self.names = [layer.name for layer in layers]
        self.numels = torch.tensor([layer.numel for layer in layers], dtype=SUM_DTYPE, device=device)
        self.shares = torch.tensor([layer.share for layer in layers], dtype=SUM_DTYPE, device=device)
        self.cuts: dict[Any, Tensor | None] = {}
        for group in dict.fromkeys(group for layer in layers for group in layer.groups):
            cut = [place for place, layer in enumerate(layers) if group in layer.groups]
            self.cuts[group] = None if len(cut) == len(layers) else torch.tensor(cut, device=device)

    def sums(self, flats: Sequence[Tensor], order: int) -> Tensor:
        """``(L,)``: this rank's part of the sums of ``|x| ** order``; ``flats`` holds one a shard."""
        return torch.cat([layout.sums(flat, order) for layout, flat in zip(self.layouts, flats, strict=True)])

    @cached_property
    def blocks(self) -> BlockTable:
        """The shards cut into blocks for the kernels; layers are counted as in the columns."""
        shards, before = [], 0
        for layout in self.layouts:
            shards.append([(s.start, s.numel, before + s.layer, s.first) for s in layout.segments])
            before += len(layout.layers)
        return BlockTable(shards, before, self.numels.device)

    def split(self, values: Tensor) -> list[Tensor]:
        """``(L,)`` cut into the layers of each shard."""
        return list(values.split([len(layout.layers) for layout in self.layouts]))


@dataclass(frozen=True)
class Ranks:
    """The ranks that step together, and the device on which they can talk to each other.

    Attributes:
        device: None where the tensors' own will do.
        everyone: process group of all ranks that step together, whatever part of the model they hold; None where no
            rank needs another one's part.
    """

    device: torch.device | None = None
    everyone: Any | None = None

    def sum(self, columns: Sequence[tuple[LayerTable, Tensor]]) -> list[Tensor]:
        """Sums over whole layers: each column's entries are summed over the groups of their layers.

        A collective: every rank of these groups calls it, with the same layers in the same order. One all-reduce a
        group, so that there is one where all layers are cut over one group.

        Args:
            columns: ``(L,)`` each, of one dtype and device, and the table of the layers that they belong to.
        """
        totals = [column for _, column in columns]
        for group in dict.fromkeys(group for table, _ in columns for group in table.cuts):
            cut = [(place, table.cuts[group]) for place, (table, _) in enumerate(columns) if group in table.cuts]
            parts = [totals[place] if index is None else totals[place][index] for place, index in cut]
            summed = self._all_reduce(torch.cat(parts), group).split([len(part) for part in parts])
            for (place, index), part in zip(cut, summed, strict=True):
                totals[place] = part if index is None else totals[place].index_copy(0, index, part)
        return totals

    def sum_over_everyone(self, values: Tensor) -> Tensor:
        """For verdicts that all ranks must share: what a model-parallel rank holds, too, counts once a rank."""
        return values if self.everyone is None else self._all_reduce(values.clone(), self.everyone)

    def _all_reduce(self, values: Tensor, group: Any) -> Tensor:
        """Summed over ``group``, where ``values`` is, which may be overwritten."""
        travelling = values.to(self.device or values.device)
        torch.distributed.all_reduce(travelling, group=group)
        return travelling.to(values.device)
