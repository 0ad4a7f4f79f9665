"""Exchanges made of others: the parts of one model, and weights that several ranks hold copies of."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.chan import Moments, zeros_like
from ds_vrgd.moments.exchange import Exchange, added
from ds_vrgd.moments.norms import ChunkNorms


class CombinedMoments:
    """Several exchanges that serve one model: that of most parameters, and those of experts or of weights with copies.

    Collectives come in one order on every rank: the first exchange may start its own during a backward pass, and the
    others theirs at its end, one after the other.

    Args:
        rest: takes what no other exchange does, and counts the chunks; None where nothing is left.
        own: by parameter, the exchange that takes its gradients; in an order that is the same on all ranks.
        tensors: by optimizer tensor, the exchange of ``own`` that has all its moments.
        runs: (tensor, start, exchange, key): elements of an optimizer tensor, from ``start`` on, of which an exchange
            of ``own`` has the moments, under ``key``; ``rest`` has those of the others.
    """

    def __init__(
        self,
        rest: Exchange | None,
        own: Mapping[Tensor, Exchange],
        tensors: Mapping[Tensor, Exchange],
        runs: Sequence[tuple[Tensor, int, Exchange, Tensor]] = (),
    ) -> None:
        self._rest = rest
        self._own, self._tensors, self._runs = dict(own), dict(tensors), list(runs)
        self._all: list[Exchange] = [*([] if rest is None else [rest]), *dict.fromkeys(self._own.values())]
        self.chunks_at_once = self._all[0].chunks_at_once

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take one gradient of one parameter, before any reduction."""
        self._own.get(param, self._all[0]).add(param, grad, keep=keep)

    def drop(self, param: Tensor) -> None:
        """Forget this window's chunks of one parameter."""
        self._own.get(param, self._all[0]).drop(param)

    def hold_back(self, held: bool) -> None:
        """Send nothing of any exchange before the end of the open micro-batch."""
        for exchange in self._all:
            exchange.hold_back(held)

    def end_micro_batch(self) -> None:
        """Close the micro-batch of every exchange."""
        for exchange in self._all:
            exchange.end_micro_batch()

    def finish(self) -> int:
        """Return k of the first exchange; a collective.

        Raises:
            RuntimeError: an exchange has seen more micro-batches than another, which copies that miss one cause.
        """
        counts = [exchange.finish() for exchange in self._all]
        seen = {k // exchange.chunks_at_once for k, exchange in zip(counts, self._all, strict=True)}
        if len(seen) > 1:
            others = "" if self._rest is None else f", and its other weights {counts[0]}"
            shared = ", ".join(map(str, sorted(set(counts[self._rest is not None :]))))
            raise RuntimeError(
                f"the weights that this stage shares with others have seen {shared} chunks in this window{others}: the "
                "copies of a weight must exchange their gradients once in every micro-batch, as in deepspeed's "
                "TrainSchedule. Train with engine.train_batch() alone: no engine.backward(), and no schedule of your "
                "own."
            )
        return counts[0]

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of one of the optimizer's tensors, flat; after :meth:`finish`."""
        if tensor in self._tensors:
            return self._tensors[tensor].moments(tensor)
        moments = zeros_like(tensor) if self._rest is None else self._rest.moments(tensor)
        for shard, start, exchange, key in self._runs:
            if shard is tensor:
                own = exchange.moments(key)
                moments = Moments(moments.total, moments.m2, own.parts)
                # To ``rest`` these elements are padding, the part of its tensors that others may write to.
                moments.total[start : start + key.numel()] = own.total
                moments.m2[start : start + key.numel()] = own.m2
        return moments

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now, outside a micro-batch: of moments, and of buffers."""
        return added(exchange.held_bytes() for exchange in self._all)

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends to others: per micro-batch, and once per window."""
        return added(exchange.sent_bytes() for exchange in self._all)

    def reset(self) -> None:
        """Begin the next window."""
        for exchange in self._all:
            exchange.reset()

    def detach(self) -> None:
        """Release all memory for good."""
        self.reset()
        for exchange in self._all:
            exchange.detach()


class CopiedMoments(CombinedMoments):
    """Moments of one weight that several ranks hold copies of, because the stages of a pipeline share it.

    The gradient of a chunk is the sum over the copies, so they exchange their parts for every micro-batch, before
    anything is squared. A copy keeps its part until the others have theirs.

    Memory, in the weight's dtype: a gradient for each micro-batch that this rank is ahead of the last one to finish it,
    and one for each copy during their exchange.

    Args:
        param: this rank's copy.
        group: process group of the ranks with copies; all of them call :meth:`start_exchange` equally often.
        inner: exchange of ``param`` alone over the data-parallel ranks, which takes the sums.
        norms: takes the norm of every part of this rank; None to take none.
    """

    def __init__(self, param: Tensor, group: Any, inner: Exchange, norms: ChunkNorms | None = None) -> None:
        super().__init__(inner, {}, {})
        self._param, self._group, self._inner, self._norms = param, group, inner, norms
        self._micro_batches = 0
        self._open: Tensor | None = None
        self._waiting: deque[Tensor] = deque()
        self._flight: tuple[list[Tensor], Any] | None = None

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take this copy's part of a gradient; it is always copied."""
        if self._open is None:
            self._open = grad.detach().clone(memory_format=torch.contiguous_format)
        else:
            self._open += grad

    def drop(self, param: Tensor) -> None:
        """Forget the parts so far. The ranks with the other copies do so, too."""
        self.finish_exchange()
        self._open = None
        self._waiting = deque(torch.zeros_like(part) for part in self._waiting)
        super().drop(param)
        if self._norms is not None:
            self._norms.forget(param)

    def end_micro_batch(self) -> None:
        """Close the micro-batch on this rank; a copy that took no part has a gradient of 0."""
        if self._open is not None and self._norms is not None:
            self._norms.note(self._micro_batches, [(self._param, self._open)])
        part = torch.zeros_like(self._param) if self._open is None else self._open
        self._waiting.append(part.detach())
        self._open = None
        self._micro_batches += 1

    def start_exchange(self) -> None:
        """Send the oldest part that waits to the other copies, after :meth:`finish_exchange`. A collective."""
        self.finish_exchange()
        part = self._waiting.popleft()
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(self._group))]
        self._flight = parts, torch.distributed.all_gather(parts, part, group=self._group, async_op=True)

    def finish_exchange(self) -> None:
        """Sum the parts under way, if any, in the order of the ranks: a micro-batch of the inner exchange."""
        if self._flight is None:
            return
        (first, *others), work = self._flight
        self._flight = None
        work.wait()
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for part in others:
            total = total + part
        self._inner.add(self._param, total)
        self._inner.end_micro_batch()

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now: of moments, and of buffers and parts that wait."""
        return added([super().held_bytes(), (0, sum(part.nbytes for part in self._waiting))])

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends to others: per micro-batch, and once per window."""
        others = torch.distributed.get_world_size(self._group) - 1
        return added([super().sent_bytes(), (self._param.nbytes * others, 0)])

    def reset(self) -> None:
        """Begin the next window."""
        if self._flight is not None:
            self._flight[1].wait()
        self._open = self._flight = None
        self._waiting.clear()
        self._micro_batches = 0
        if self._norms is not None:
            self._norms.clear()
        super().reset()
