"""Mean and centred sum of squares of chunk gradients: formed, and merged by Chan's formula.

Squares are always centred before they are summed: ``E[g^2] - E[g]^2`` would cancel.

Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979), equation 2.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_vrgd import kernels


class Moments(NamedTuple):
    """The moments of the chunks of a window, element by element.

    Under ZeRO ``total`` is the sum over the micro-batches of the mean over the ranks: the gradient that a step takes.
    """

    total: Tensor  # ``parts`` times the mean over the chunks, ``(n,)``, fp32 or wider
    m2: Tensor  # centred sum of squares over the chunks, same shape and dtype; ``(0,)`` where only the mean is wanted
    parts: int = 1  # the divisor of ``total``

    @property
    def mean(self) -> Tensor:
        """Return the mean over the chunks."""
        return self.total if self.parts == 1 else self.total / self.parts


def zeros_like(shard: Tensor, parts: int = 1) -> Moments:
    """Return moments of 0, flat, for chunks that brought no gradient of ``shard``; fp32 or wider."""
    total, m2 = torch.zeros(
        2, shard.numel(), dtype=torch.promote_types(shard.dtype, torch.float32), device=shard.device
    )
    return Moments(total, m2, parts)


def moments_of(chunks: Tensor, *, variance: bool = True) -> tuple[Tensor, Tensor]:
    """Return the mean and the centred sum of squares over the first axis.

    Args:
        chunks: ``(k, n)``, any floating dtype; row d is the gradient of chunk d.
        variance: whether the sum of squares is wanted; without, it is ``(0,)``.

    Returns:
        Both ``(n,)`` in fp32 (fp64 for fp64 input). The rows are summed in their order, the same on every rank.
    """
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    mean = chunks[0].to(dtype, copy=True)
    for chunk in chunks[1:]:
        mean.add_(chunk)
    mean.div_(len(chunks))
    m2 = torch.zeros_like(mean) if variance else mean.new_empty(0)
    for chunk in chunks if variance else ():
        deviation = chunk - mean
        m2.addcmul_(deviation, deviation)
    return mean, m2


def merge_chunk_of_each_(totals: list[Tensor], m2s: list[Tensor], count: int, chunks: list[Tensor]) -> None:
    """Merge one more chunk into the moments of each of many parameters, in place; a few launches for all of them.

    The sum is kept, not a running mean, whose rounding would be all that is left where chunks cancel.

    Args:
        totals: sum of the chunks so far of every parameter, updated; one dtype and device.
        m2s: their centred sums of squares, updated.
        count: chunks merged so far. 0 overwrites both without reading them, so that nothing of an abandoned window
            (infinities of an overflow, for example) leaks into the next one.
        chunks: the gradient of every parameter, of ``totals``' shapes and dtype.
    """
    if count == 0:
        torch._foreach_copy_(totals, chunks)
        torch._foreach_zero_(m2s)
        return
    deltas = torch._foreach_div(totals, -count)
    torch._foreach_add_(deltas, chunks)
    torch._foreach_add_(totals, chunks)
    torch._foreach_addcmul_(m2s, deltas, deltas, value=count / (count + 1))


def merge_zeros_(total: Tensor, m2: Tensor, parts: int, zeros: int, chunks: int = 1) -> None:
    """Merge ``zeros`` micro-batches whose gradient is 0 into the moments of ``parts`` others, in place.

    Args:
        total, m2: sum of the micro-batches' means, and centred sum of squares, any shape.
        parts: micro-batches merged so far. 0 overwrites both, as in :func:`merge_chunk_of_each_`.
        zeros: at least 1.
        chunks: the number of chunks of a micro-batch.
    """
    if parts == 0:
        total.zero_()
        m2.zero_()
    else:
        mean = total / parts
        m2.addcmul_(mean, mean, value=chunks * parts * zeros / (parts + zeros))


def merge_chunks_(
    received: Tensor, total: Tensor, m2: Tensor, parts: int, out: Tensor | None = None, divisor: float = 1.0
) -> None:
    """Merge a micro-batch of k chunks into the moments of ``parts`` micro-batches of k chunks each, in place.

    Args:
        received: ``(k, n)``, any floating dtype; row d is the gradient of chunk d. Rows are summed in their order.
        total: ``(n,)``, sum over the micro-batches so far of the mean over their k chunks; fp32 (fp64 for fp64 chunks).
        m2: ``(n,)``, centred sum of squares over all ``parts * k`` chunks so far; same dtype; or ``(0,)``.
        parts: micro-batches merged so far. 0 overwrites ``total`` and ``m2`` without reading them, as in
            :func:`merge_chunk_of_each_`.
        out: ``(n,)``, overwritten with the sum of the k chunks over ``divisor``; of ``total``'s dtype.
        divisor: number of chunks for their mean.
    """
    if kernels.usable(total, m2) and received.stride(1) == 1:
        from ds_vrgd.kernels.merge import merge_chunks

        merge_chunks(received, total, m2, parts, out, divisor)
        return
    mean, squares = moments_of(received, variance=bool(m2.numel()))
    if out is not None:
        torch.mul(mean, len(received) / divisor, out=out)
    if parts == 0:
        total.copy_(mean)
        m2.copy_(squares)
        return
    if m2.numel():
        delta = mean - total / parts
        m2.add_(squares.addcmul_(delta, delta, value=len(received) * (parts / (parts + 1))))
    total.add_(mean)


def merge_nodes_(totals: Tensor, m2s: Tensor, total: Tensor, m2: Tensor, parts: int, chunks: int) -> None:
    """Merge the moments of nodes with equally many chunks, in node order, so that every run gives the same bits.

    Args:
        totals, m2s: ``(nodes, n)``, of each node's ``parts * chunks`` chunks: ``parts`` times their mean, and their
            centred sum of squares.
        total, m2: ``(n,)``, overwritten with those of all chunks; ``m2`` may be without elements.
        parts: micro-batches.
        chunks: the number of chunks of a micro-batch on one node.
    """
    total.copy_(totals[0])
    for row in totals[1:]:
        total.add_(row)
    total.div_(len(totals))
    if not m2.numel():
        return
    m2.copy_(m2s[0])
    for row in m2s[1:]:
        m2.add_(row)
    for row in totals:
        # The deviation of a mean is that of a total over parts, and it stands for parts * chunks of them.
        deviation = row - total
        m2.addcmul_(deviation, deviation, value=chunks / parts)


def merge_ranks_(total: Tensor, m2: Tensor, parts: int, chunks: int, group: Any) -> None:
    """Merge the moments of ranks with equally many chunks, in place: two sums of the whole over ``group``.

    Args:
        total, m2: of this rank's ``parts * chunks`` chunks, as in :func:`merge_nodes_`. ``total`` becomes the mean
            over the ranks.
        parts, chunks: as there.
        group: process group of the ranks.
    """
    deviation = total.clone()
    torch.distributed.all_reduce(total, group=group)
    total.div_(torch.distributed.get_world_size(group))
    deviation.sub_(total)
    m2.addcmul_(deviation, deviation, value=chunks / parts)  # as in merge_nodes_
    torch.distributed.all_reduce(m2, group=group)
