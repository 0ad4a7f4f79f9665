"""Weights of which several ranks hold a copy, each with a part of the gradient: those that a pipeline's stages tie.

The gradient of a chunk is the sum over the copies, so the parts meet micro-batch by micro-batch, before anything is
squared. A copy keeps its part until the others have theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.chan import Moments
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.replicated import ReplicatedMoments
from ds_vrgd.moments.route import Route
from ds_vrgd.moments.sharded import ShardedMoments

PerRank = ReplicatedMoments | ShardedMoments


class CopiedMoments:
    """Moments of one weight whose copies are held by the ranks of a group.

    Memory, in the weight's dtype: a gradient for each micro-batch that this rank is ahead of the last one to finish it,
    and one for each copy while they meet.

    Args:
        param: this rank's copy.
        group: process group of the ranks with copies; all call :meth:`meet` as often.
        moments: of ``param`` alone, over the data-parallel ranks; takes the sums.
        norms: takes the norm of every part of this rank; None to take none.
    """

    def __init__(self, param: Tensor, group: Any, moments: PerRank, norms: ChunkNorms | None = None) -> None:
        self.moments = moments
        self._param = param
        self._group = group
        self._norms = norms
        self._micro_batches = 0
        self._open: Tensor | None = None
        self._waiting: deque[Tensor] = deque()
        self._flight: tuple[list[Tensor], Any] | None = None

    def add(self, grad: Tensor) -> None:
        """Take this copy's part; a second one in the same micro-batch belongs to the same chunk."""
        if self._open is None:
            self._open = grad.detach().clone(memory_format=torch.contiguous_format)
        else:
            self._open += grad

    def end_micro_batch(self) -> None:
        """Close the micro-batch on this rank; a copy that took no part has a gradient of 0."""
        if self._open is not None and self._norms is not None:
            self._norms.note(self._micro_batches, [(self._param, self._open)])
        part = torch.zeros_like(self._param) if self._open is None else self._open
        self._waiting.append(part.detach())
        self._open = None
        self._micro_batches += 1

    def meet(self) -> None:
        """Send the oldest part that waits to the other copies; what was sent before has arrived. A collective."""
        self.land()
        part = self._waiting.popleft()
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(self._group))]
        self._flight = parts, torch.distributed.all_gather(parts, part, group=self._group, async_op=True)

    def land(self) -> None:
        """Take in the sum of what is under way, in the order of the ranks; one of the data-parallel ranks' chunks."""
        if self._flight is None:
            return
        (first, *others), work = self._flight
        self._flight = None
        work.wait()
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for part in others:
            total = total + part
        self.moments.add(self._param, total)
        self.moments.end_micro_batch()

    def reset(self) -> None:
        """Begin the next window."""
        if self._flight is not None:
            self._flight[1].wait()
        self._open = self._flight = None
        self._waiting.clear()
        self._micro_batches = 0
        self.moments.reset()

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held now: of moments, and of buffers and parts that wait."""
        moments, buffers = self.moments.held_bytes()
        return moments, buffers + sum(part.nbytes for part in self._waiting)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends to others: in a micro-batch, and once a window."""
        often, once = self.moments.sent_bytes()
        return often + self._param.nbytes * (torch.distributed.get_world_size(self._group) - 1), once


@dataclass(frozen=True)
class _Run:
    """A weight's elements in one of the optimizer's shards, whose moments are kept elsewhere."""

    weight: Tensor
    key: Tensor
    start: int


class WithCopies:
    """Moments of a model of which some weights have copies elsewhere; stands for those of the whole model.

    Args:
        rest: of all other weights; None if there are none.
        copied: by weight.
        runs: where shards are cut: the routes of the copied weights, as they were and as ``copied`` has them.
    """

    def __init__(
        self, rest: PerRank | None, copied: Mapping[Tensor, CopiedMoments], runs: Sequence[tuple[Route, Route]] = ()
    ) -> None:
        self.copied = dict(copied)
        self._rest = rest
        self._runs: dict[Tensor, list[_Run]] = {}
        for route, own in runs:
            self._runs.setdefault(route.shard, []).append(_Run(own.param, own.shard, route.shard_start))

    @property
    def _all(self) -> list[PerRank | CopiedMoments]:
        return [*([] if self._rest is None else [self._rest]), *self.copied.values()]

    def add(self, param: Tensor, grad: Tensor) -> None:
        """Take one gradient of one parameter, before any reduction."""
        if param in self.copied:
            self.copied[param].add(grad)
        elif self._rest is not None:
            self._rest.add(param, grad)

    def end_micro_batch(self) -> None:
        """Close the micro-batch on this rank."""
        for part in self._all:
            part.end_micro_batch()

    def finish(self) -> int:
        """The window's k, when all copies have met."""
        counts = [part.finish() for part in (self._rest, *(own.moments for own in self.copied.values())) if part]
        if len(set(counts)) > 1:
            raise RuntimeError(f"of the weights that stages share {counts} chunks have come, and of the others as many")
        return counts[0]

    def moments(self, tensor: Tensor) -> Moments:
        """Of a parameter, or of a shard; as the one who holds it says."""
        if tensor in self.copied:
            return self.copied[tensor].moments.moments(tensor)
        runs = self._runs.get(tensor, [])
        if self._rest is not None:
            moments = self._rest.moments(tensor)
        else:
            zeros = torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
            moments = Moments(zeros, zeros.clone())
        for run in runs:
            own = self.copied[run.weight].moments.moments(run.key)
            moments = Moments(moments.total, moments.m2, own.parts)
            # There is nothing else: to the others' moments these elements are padding.
            moments.total[run.start : run.start + run.key.numel()] = own.total
            moments.m2[run.start : run.start + run.key.numel()] = own.m2
        return moments

    def reset(self) -> None:
        """Begin the next window."""
        for part in self._all:
            part.reset()

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held now, outside a micro-batch: of moments, and of buffers."""
        moments, buffers = zip(*(part.held_bytes() for part in self._all), strict=True)
        return sum(moments), sum(buffers)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends to others: in a micro-batch, and once a window."""
        often, once = zip(*(part.sent_bytes() for part in self._all), strict=True)
        return sum(often), sum(once)
