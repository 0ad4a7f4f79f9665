"""Mean and centred sum of squares of chunk gradients: formed, and merged by Chan's formula.

Squares are always centred before they are summed: ``E[g^2] - E[g]^2`` would cancel.

Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances" (1979), equation 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_vrgd import kernels


@dataclass(frozen=True)
class Moments:
    """Of the chunks of a window, element by element.

    Attributes:
        total: ``parts`` times the mean over the chunks, ``(n,)``, fp32 or wider. Under ZeRO it is the sum over the
            micro-batches of the mean over the ranks, which is the gradient that a step takes.
        m2: centred sum of squares over the chunks, same shape and dtype.
        parts: what ``total`` is to be divided by.
    """

    total: Tensor
    m2: Tensor
    parts: int = 1

    @property
    def mean(self) -> Tensor:
        """Mean over the chunks."""
        return self.total if self.parts == 1 else self.total / self.parts


def moments_of(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and centred sum of squares over the first axis.

    Args:
        chunks: ``(k, n)``, any floating dtype; row d is the gradient of chunk d.

    Returns:
        ``mean`` and ``m2``, both ``(n,)`` in fp32 (fp64 for fp64 input). The rows are summed in their
        order, so the result does not depend on the rank that computes it.
    """
    dtype = torch.promote_types(chunks.dtype, torch.float32)
    mean = chunks[0].to(dtype, copy=True)
    for chunk in chunks[1:]:
        mean.add_(chunk)
    mean.div_(len(chunks))
    m2 = torch.zeros_like(mean)
    for chunk in chunks:
        deviation = chunk - mean
        m2.addcmul_(deviation, deviation)
    return mean, m2


def merge_(mean: Tensor, m2: Tensor, count: int, new_mean: Tensor, new_m2: Tensor | float, new_count: int) -> None:
    """Merge the moments of ``new_count`` chunks into those of ``count`` chunks, in place.

    Args:
        mean, m2: moments so far, updated; any shape.
        count: chunks they stand for. 0 overwrites them, so what an abandoned window left behind
            (infinities of an overflow, say) cannot leak into the next one.
        new_mean, new_m2: moments to merge, same shape; ``new_m2`` may be 0.0 for a single chunk.
        new_count: chunks those stand for, at least 1.
    """
    if count == 0:
        mean.copy_(new_mean)
        m2.copy_(new_m2) if isinstance(new_m2, Tensor) else m2.fill_(new_m2)
        return
    delta = new_mean - mean
    mean.add_(delta, alpha=new_count / (count + new_count))
    m2.add_(new_m2).addcmul_(delta, delta, value=count * new_count / (count + new_count))


def merge_chunk_of_each_(means: list[Tensor], m2s: list[Tensor], count: int, chunks: list[Tensor]) -> None:
    """Merge one more chunk into the moments of each of many parameters, in place; a few launches for all of them.

    Args:
        means, m2s: moments so far of every parameter, updated; one dtype and device.
        count: chunks that each of them stands for. 0 overwrites them, as in :func:`merge_`.
        chunks: the gradient of every parameter, of the same shape and dtype.
    """
    if count == 0:
        torch._foreach_copy_(means, chunks)
        torch._foreach_zero_(m2s)
        return
    deltas = torch._foreach_sub(chunks, means)
    torch._foreach_add_(means, deltas, alpha=1 / (count + 1))
    torch._foreach_addcmul_(m2s, deltas, deltas, value=count / (count + 1))


def merge_chunks_(received: Tensor, total: Tensor, m2: Tensor, parts: int) -> None:
    """Merge a micro-batch of k chunks into the moments of ``parts`` micro-batches of k chunks each, in place.

    Args:
        received: ``(k, n)``, any floating dtype; row d is the gradient of chunk d. Rows are summed in their order.
        total: ``(n,)``, sum over the micro-batches so far of the mean over their k chunks; fp32 (fp64 for fp64 chunks).
        m2: ``(n,)``, centred sum of squares over all ``parts * k`` chunks so far; same dtype.
        parts: micro-batches merged so far. 0 overwrites ``total`` and ``m2`` without reading them, so what an abandoned
            window left behind (infinities of an overflow, say) cannot leak into the next one.
    """
    if kernels.usable(total, m2) and received.stride(1) == 1:
        from ds_vrgd.kernels.merge import merge_chunks

        merge_chunks(received, total, m2, parts)
        return
    mean, squares = moments_of(received)
    if parts == 0:
        total.copy_(mean)
        m2.copy_(squares)
        return
    delta = mean - total / parts
    total.add_(mean)
    m2.add_(squares.addcmul_(delta, delta, value=len(received) * (parts / (parts + 1))))
