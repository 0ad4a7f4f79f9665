"""Chunk moments where every rank holds every parameter whole: plain PyTorch, DDP, ZeRO stage 0.

Each rank keeps the moments of its own chunks, full-sized; they are merged over the ranks once per step.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.chan import Moments, merge_chunk_of_each_, merge_ranks_, merge_zeros_
from ds_vrgd.moments.groups import SequenceGroups
from ds_vrgd.moments.hooks import value_of
from ds_vrgd.moments.norms import ChunkNorms

# Elements that are merged, or that the ranks of a sequence sum, at once: 64 MB in fp32.
AT_ONCE = 2**24


@dataclass(eq=False)
class _Held:
    """Sum and centred squares of one parameter's chunks on this rank, as views into the flat buffers of a device."""

    total: Tensor  # of ``chunks`` chunks, as ``m2`` is
    m2: Tensor
    micro_batches: int = 0  # those that the chunks came from, a bit each
    pending: Tensor | None = None  # the gradient of the open micro-batch

    @property
    def chunks(self) -> int:
        """Return the number of chunks merged so far."""
        return self.micro_batches.bit_count()

    def take_pending(self) -> Tensor:
        """Return the gradient of the open micro-batch, flat and wide (zeros where none came), and close it."""
        pending, self.pending = self.pending, None
        return torch.zeros_like(self.total) if pending is None else pending.flatten().to(self.total.dtype)


class ReplicatedMoments:
    """Sum and centred sum of squares over the chunks of a window, of whole parameters.

    Memory: 8 bytes per element for the moments (16 for fp64 parameters), and one gradient in its own
    dtype while a micro-batch is open: a copy, or the one that backward made.

    Args:
        params: parameters whose gradients are observed, in an order that is the same on all ranks.
        group: process group of the data-parallel ranks; None for one process.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        sequences: which ranks compute one chunk together; None where every rank has chunks of its own. Their parts
            are summed at the end of each micro-batch, in the order of ``params``.
        counts_all: every call of :meth:`end_micro_batch` closes a micro-batch, also one without a gradient here; else
            only where one came.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group: Any | None = None,
        *,
        norms: ChunkNorms | None = None,
        sequences: SequenceGroups | None = None,
        counts_all: bool = False,
    ) -> None:
        self._params, self._group, self._norms, self._sequences = list(params), group, norms, sequences
        self._sharing = 1 if sequences is None else sequences.size  # ranks that hold the same chunks
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self.chunks_at_once = self.ranks // self._sharing
        self._held: dict[Tensor, _Held] = {}
        self._flats: list[tuple[Tensor, Tensor]] = []
        self._counts_all = counts_all or sequences is not None
        self._micro_batches = 0
        self._merged: int | None = None  # micro-batches in the moments, when they are those of all ranks

    def observe(self, params: Sequence[Tensor]) -> None:
        """Observe these parameters from now on, in the same order on all ranks; new ones had a gradient of 0 so far."""
        self._params = list(params)
        if self._held:
            self._allocate([param for param in params if param not in self._held])
            self._held = {param: self._held[param] for param in params}

    def _allocate(self, observed: Sequence[Tensor]) -> None:
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in observed:
            alike.setdefault((param.device, torch.promote_types(param.dtype, torch.float32)), []).append(param)
        for (device, dtype), params in alike.items():
            sizes = [param.numel() for param in params]
            total = torch.zeros(sum(sizes), dtype=dtype, device=device)
            m2 = torch.zeros_like(total)
            self._flats.append((total, m2))
            for param, *views in zip(params, total.split(sizes), m2.split(sizes), strict=True):
                self._held[param] = _Held(*views)

    def _all(self) -> dict[Tensor, _Held]:
        """Return what is held of every observed parameter; allocated when it is first needed."""
        if not self._held:
            self._allocate(self._params)
        return self._held

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take one gradient of one parameter, before any reduction: as it is with ``keep``, or a copy."""
        held = self._all()[param]
        if held.pending is None:
            held.pending = value_of(grad) if keep else grad.detach().clone()
        else:
            held.pending = held.pending.to(held.total.dtype) + grad

    def keep_apart(self, param: Tensor, grad: Tensor) -> None:
        """Copy the open gradient of one parameter if it shares memory with ``grad``, which others may change."""
        held = self._held.get(param)
        if held is not None and held.pending is not None and held.pending.data_ptr() == grad.data_ptr():
            held.pending = held.pending.clone()

    def drop(self, param: Tensor) -> None:
        """Forget this window's chunks of one parameter, and what a backward pass that broke off has left."""
        self.drop_complete(param)
        if param in self._held:
            self._held[param].pending = None

    def drop_complete(self, param: Tensor) -> None:
        """Forget this window's chunks of one parameter except for the open one."""
        if param in self._held:
            self._held[param].micro_batches = 0
        if self._norms is not None:
            self._norms.forget(param)

    def hold_back(self, held: bool) -> None:
        """Do nothing: no gradient leaves before the end of its micro-batch."""

    def end_micro_batch(self) -> None:
        """Close the open chunk of this rank; with ``sequences`` a collective."""
        came = [(param, held.pending) for param, held in reversed(self._held.items()) if held.pending is not None]
        if came and self._norms is not None:
            self._norms.note(self._micro_batches, came)
        self._micro_batches += bool(came) or self._counts_all
        if self._sequences is not None:
            # Others may have gradients where this rank has none.
            for together in _at_once(self._all().values(), lambda held: (held.total.device, held.total.dtype)):
                parts = torch.cat([held.take_pending() for held in together])
                torch.distributed.all_reduce(parts, group=self._sequences.group)
                sizes = [held.total.numel() for held in together]
                for held, part in zip(together, parts.split(sizes), strict=True):
                    held.pending = part
        pending = (held for held in self._held.values() if held.pending is not None)
        for together in _at_once(pending, lambda held: (held.total.device, held.total.dtype, held.chunks)):
            totals, m2s = [held.total for held in together], [held.m2 for held in together]
            merge_chunk_of_each_(totals, m2s, together[0].chunks, [held.take_pending() for held in together])
            for held in together:
                held.micro_batches |= 1 << self._micro_batches

    def finish(self) -> int:
        """Merge the ranks' moments, once per window, and return k; a collective where there is a group.

        Raises:
            RuntimeError: on all ranks, where they observe different parameters or unequal numbers of micro-batches.
        """
        if self._merged is None:
            if not self._counts_all:  # else whoever counts ends each micro-batch
                self.end_micro_batch()
            # Not the most chunks of one parameter: branches may take turns, and none be in every micro-batch.
            union = functools.reduce(operator.or_, (held.micro_batches for held in self._all().values()), 0)
            local = self._micro_batches if self._counts_all else union.bit_count()
            for held in self._held.values():
                if held.chunks < local:  # it took no part in some micro-batches: its gradient there is 0
                    merge_zeros_(held.total, held.m2, held.chunks, local - held.chunks)
            if self.ranks > 1:
                self._check_equal(local)
                for total, m2 in self._flats:
                    merge_ranks_(total, m2, max(local, 1), 1, self._group)
                    if self._sharing > 1:  # ranks that hold the same chunks count the squares once each
                        m2.div_(self._sharing)
            self._merged = local
        return self._merged * self.chunks_at_once

    def _check_equal(self, local: int) -> None:
        """Raise on every rank where the ranks differ in their number of micro-batches, or in what they observe."""
        numel = sum(param.numel() for param in self._params)
        extremes = torch.tensor([local, -local, numel, -numel], device=self._params[0].device)
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=self._group)
        most, minus_least, largest, minus_smallest = extremes.tolist()
        if most != -minus_least:
            raise RuntimeError(
                f"the ranks differ in the micro-batches of this step: {-minus_least} on one, {most} on another. Give "
                "every rank the same number of backward passes between two calls of step()."
            )
        if largest != -minus_smallest:
            raise RuntimeError(
                f"the ranks differ in the parameters that they optimize: {-minus_smallest} elements on one, {largest} "
                "on another. Give every rank's optimizer all parameters; torch's ZeroRedundancyOptimizer does not, "
                "and DeepSpeed ZeRO takes its place."
            )

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of one parameter, flat, over all k chunks; after :meth:`finish`."""
        held = self._held[tensor]
        return Moments(held.total, held.m2, self._merged or 1)

    @property
    def any_chunks(self) -> bool:
        """Return whether this rank has seen a gradient in this window."""
        return any(held.chunks or held.pending is not None for held in self._held.values())

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now, outside a micro-batch: of moments, and of buffers, which do not exist."""
        return sum(moment.nbytes for flats in self._flats for moment in flats), 0

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends per micro-batch, and once per window, in rings of all-reduces."""
        moments = self.held_bytes()[0]
        return (self._sharing - 1) * moments // self._sharing, 2 * (self.ranks - 1) * moments // self.ranks

    def reset(self) -> None:
        """Begin the next window."""
        for held in self._held.values():
            held.micro_batches, held.pending = 0, None
        if self._norms is not None:
            self._norms.clear()
        self._micro_batches, self._merged = 0, None

    def detach(self) -> None:
        """Release all memory for good."""
        self.reset()
        self._held.clear()
        self._flats.clear()


def _at_once(all_held: Iterable[_Held], alike: Callable[[_Held], Hashable]) -> Iterator[list[_Held]]:
    """Yield those that are alike together, in their order, up to ``AT_ONCE`` elements."""
    waiting: dict[Hashable, tuple[list[_Held], int]] = {}
    for held in all_held:
        key = alike(held)
        together, elements = waiting.pop(key, ([], 0))
        together.append(held)
        elements += held.total.numel()
        if elements >= AT_ONCE:
            yield together
        else:
            waiting[key] = together, elements
    yield from (together for together, _ in waiting.values())
