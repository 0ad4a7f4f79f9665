"""The protocol of every exchange: chunk gradients go in, and the moments over the chunks of a window come out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from ds_vrgd.moments.chan import Moments


class Exchange(Protocol):
    """Mean and centred sum of squares over the chunks of a window, fed with gradients before any reduction.

    An engine adapter brings gradients with :meth:`add`, ends each micro-batch, and calls :meth:`finish` before it reads
    :meth:`moments`. Every rank calls the collectives in the same order; the gradients may arrive in any order.

    Attributes:
        chunks_at_once: the number of chunks of a micro-batch, over all ranks.
    """

    chunks_at_once: int

    def add(self, param: Tensor, grad: Tensor, *, keep: bool = False) -> None:
        """Take one gradient of one parameter.

        A second gradient in the same micro-batch belongs to the same chunk, and is added to the first.

        Args:
            param: an observed parameter.
            grad: its gradient, of any strides.
            keep: nobody else writes to ``grad`` before the micro-batch ends, so it need not be copied at once.
        """

    def drop(self, param: Tensor) -> None:
        """Forget the chunks of one parameter in this window: its gradient was thrown away unused.

        The micro-batches so far count as zero gradients if others follow. All ranks call it alike.
        """

    def hold_back(self, held: bool) -> None:
        """Send nothing before the end of the open micro-batch, because more backward passes belong to it."""

    def end_micro_batch(self) -> None:
        """Close the open micro-batch: what came in it is one chunk of this rank."""

    def finish(self) -> int:
        """Complete the moments of all chunks so far and return their number k over all ranks; a collective."""

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments that belong to one of the optimizer's tensors, flat; after :meth:`finish`."""

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held now, outside a micro-batch: of moments, and of buffers."""

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends to others: per micro-batch, and once per window."""

    def reset(self) -> None:
        """Begin the next window, also after a backward pass that was broken off."""

    def detach(self) -> None:
        """Release all memory and callbacks for good."""


def added(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of the first and of the second numbers of ``pairs``."""
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)
