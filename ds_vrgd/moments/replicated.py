"""Chunk moments where every rank holds every parameter whole: plain PyTorch, DDP, ZeRO stage 0.

Each rank keeps the moments of its own chunks, full-sized; they meet once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.chan import Moments, merge_, merge_chunk_of_each_
from ds_vrgd.moments.norms import ChunkNorms
from ds_vrgd.moments.sequences import SequenceGroups

# Elements that are merged, or that the ranks of a sequence sum, at once: 64 MB in fp32.
AT_ONCE = 2**24


class _Accumulator:
    """Moments of one parameter's chunks on this rank, as views into a device's flat buffers."""

    def __init__(self, mean: Tensor, m2: Tensor) -> None:
        self.mean, self.m2 = mean, m2
        self.chunks = 0
        self.pending: Tensor | None = None

    def add(self, grad: Tensor, keep: bool) -> None:
        """Take a gradient, as it is or a copy; a second one in the same micro-batch belongs to the same chunk."""
        if self.pending is None:
            self.pending = grad.detach() if keep else grad.detach().clone()
        else:
            self.pending = self.pending.to(self.mean.dtype) + grad

    def restart(self) -> None:
        """Forget everything, also what a backward pass that broke off has left."""
        self.chunks, self.pending = 0, None

    def pad(self, chunks: int) -> None:
        """Count the micro-batches in which the parameter took no part: its gradient there is 0."""
        if self.chunks < chunks:
            zeros = torch.zeros_like(self.mean)
            merge_(self.mean, self.m2, self.chunks, zeros, 0.0, chunks - self.chunks)
            self.chunks = chunks


class ReplicatedMoments:
    """Mean and centred sum of squares over the chunks of a window (what one optimizer step sees).

    Memory: 8 bytes an element for the moments (16 for fp64 parameters), and one gradient in its own
    dtype while a micro-batch is open: a copy, or the one that backward made.

    Args:
        params: parameters whose gradients are observed, in an order that is the same on all ranks.
        group: process group of the data-parallel ranks; None for one process.
        norms: takes the norm of every chunk gradient of this rank; None to take none.
        sequences: which ranks compute one chunk together; None where every rank has chunks of its own. Their parts
            are summed at the end of each micro-batch, in the order of ``params``.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        group: Any | None = None,
        *,
        norms: ChunkNorms | None = None,
        sequences: SequenceGroups | None = None,
    ) -> None:
        self._params = list(params)
        self._norms = norms
        self._group = group
        self._sequences = sequences
        self.ranks = 1 if group is None else torch.distributed.get_world_size(group)
        self._accumulators: dict[Tensor, _Accumulator] = {}
        self._flats: list[tuple[Tensor, Tensor]] = []
        self._merged = False
        self._chunks = 0
        self._micro_batches = 0

    def extend(self, params: Sequence[Tensor]) -> None:
        """Observe more parameters, in the same order on all ranks; in the micro-batches so far their gradient was 0."""
        self._params += params
        if self._accumulators:
            self._allocate(params)

    def _allocate(self, observed: Sequence[Tensor]) -> None:
        buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in observed:
            key = (param.device, torch.promote_types(param.dtype, torch.float32))
            buckets.setdefault(key, []).append(param)
        for (device, dtype), params in buckets.items():
            sizes = [param.numel() for param in params]
            mean = torch.zeros(sum(sizes), dtype=dtype, device=device)
            m2 = torch.zeros_like(mean)
            self._flats.append((mean, m2))
            for param, *views in zip(params, mean.split(sizes), m2.split(sizes), strict=True):
                self._accumulators[param] = _Accumulator(*views)

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take one gradient of one parameter, before any reduction.

        Args:
            keep: nobody changes ``grad`` before the micro-batch ends, so that no copy is needed.
        """
        if not self._accumulators:
            self._allocate(self._params)
        self._accumulators[param].add(grad, keep)

    def restart(self, param: Tensor) -> None:
        """Forget this window's chunks of one parameter (its gradient was thrown away unused)."""
        if param in self._accumulators:
            self._accumulators[param].restart()
        if self._norms is not None:
            self._norms.forget(param)

    def end_micro_batch(self) -> None:
        """Close the chunk that is open on this rank."""
        backward = reversed(self._accumulators.items())
        came = [(param, held.pending) for param, held in backward if held.pending is not None]
        if came and self._norms is not None:
            self._norms.note(self._micro_batches, came)
        self._micro_batches += bool(came) or self._sequences is not None
        if self._sequences is not None:
            self._join_parts(self._sequences)
        self._close()

    def _close(self) -> None:
        """What is pending becomes one chunk."""
        pending = (held for held in self._accumulators.values() if held.pending is not None)
        for together in _at_once(pending, lambda held: (held.mean.device, held.mean.dtype, held.chunks)):
            _merge_pending(together)

    def _join_parts(self, sequences: SequenceGroups) -> None:
        """Sum every gradient over the ranks that share this rank's samples; what a rank has no part in counts as 0."""
        if not self._accumulators:
            self._allocate(self._params)  # others may have gradients
        for together in _at_once(self._accumulators.values(), lambda held: (held.mean.device, held.mean.dtype)):
            _sum_pending(together, sequences.group)

    def finish(self) -> int:
        """Merge the ranks' moments, once a window; returns k. A collective where there is a group.

        Raises:
            RuntimeError: on all ranks, where they observe different parameters or unequal numbers of micro-batches.
        """
        if not self._merged:
            if not self._accumulators:
                self._allocate(self._params)
            if self._sequences is None:  # else whoever set them says where micro-batches end: a collective
                self.end_micro_batch()
            local = max((a.chunks for a in self._accumulators.values()), default=0)
            for accumulator in self._accumulators.values():
                accumulator.pad(local)
            if self.ranks > 1:
                self._check_equal(local)
                for mean, m2 in self._flats:
                    self._merge_ranks(mean, m2, local)
            self._chunks = local * self.ranks // self._sharing
            self._merged = True
        return self._chunks

    @property
    def _sharing(self) -> int:
        """Ranks that hold the same chunks."""
        return 1 if self._sequences is None else self._sequences.size

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
                f"the ranks differ in the parameters that they optimize: {-minus_smallest} elements on one, "
                f"{largest} on another. Give every rank's optimizer all parameters; torch's ZeroRedundancyOptimizer "
                "does not, and DeepSpeed ZeRO takes its place."
            )

    def _merge_ranks(self, mean: Tensor, m2: Tensor, chunks: int) -> None:
        """Chan's formula for equally many chunks a rank: two sums of the whole model over the ranks.

        Ranks that hold the same chunks leave the mean as it is, and count the squares once each.
        """
        local = mean.clone()
        torch.distributed.all_reduce(mean, group=self._group)
        mean.div_(self.ranks)
        local.sub_(mean)
        m2.addcmul_(local, local, value=chunks)
        torch.distributed.all_reduce(m2, group=self._group)
        if self._sharing > 1:
            m2.div_(self._sharing)

    def moments(self, param: Tensor) -> Moments:
        """Of one parameter, flat, over all k chunks; after :meth:`finish`."""
        accumulator = self._accumulators[param]
        return Moments(accumulator.mean, accumulator.m2)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held now, outside a micro-batch: of moments, and of buffers, which there are none of."""
        return sum(moment.nbytes for flats in self._flats for moment in flats), 0

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends to others: in a micro-batch, and once a window, as a ring all-reduces."""
        moments = self.held_bytes()[0]
        return (self._sharing - 1) * moments // self._sharing, 2 * (self.ranks - 1) * moments // self.ranks

    def reset(self) -> None:
        """Begin the next window."""
        for accumulator in self._accumulators.values():
            accumulator.restart()
        if self._norms is not None:
            self._norms.clear()
        self._chunks = 0
        self._micro_batches = 0
        self._merged = False


def _at_once(
    accumulators: Iterable[_Accumulator], alike: Callable[[_Accumulator], Hashable]
) -> Iterator[list[_Accumulator]]:
    """Those that are alike together, in their order, until they hold ``AT_ONCE`` elements."""
    waiting: dict[Hashable, tuple[list[_Accumulator], int]] = {}
    for held in accumulators:
        key = alike(held)
        together, elements = waiting.pop(key, ([], 0))
        together.append(held)
        elements += held.mean.numel()
        if elements >= AT_ONCE:
            yield together
        else:
            waiting[key] = together, elements
    for together, _ in waiting.values():
        yield together


def _merge_pending(accumulators: Sequence[_Accumulator]) -> None:
    """Take the gradients of the micro-batch that is open, of parameters that have seen equally many chunks."""
    chunks = []
    for held in accumulators:
        assert held.pending is not None
        chunks.append(held.pending.flatten().to(held.mean.dtype))
        held.pending = None
    means, m2s = [held.mean for held in accumulators], [held.m2 for held in accumulators]
    merge_chunk_of_each_(means, m2s, accumulators[0].chunks, chunks)
    for held in accumulators:
        held.chunks += 1


def _sum_pending(accumulators: Sequence[_Accumulator], group: Any) -> None:
    """Sum the gradients of the micro-batch that is open over the ranks of ``group``, in one all-reduce."""
    together = torch.cat(
        [torch.zeros_like(held.mean) if held.pending is None else held.pending.flatten().to(held.mean.dtype)
         for held in accumulators]
    )  # fmt: skip
    torch.distributed.all_reduce(together, group=group)
    for held, part in zip(accumulators, together.split([held.mean.numel() for held in accumulators]), strict=True):
        held.pending = part
