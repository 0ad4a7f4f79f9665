"""Several exchanges beside each other, over groups of their own: those of experts beside everything else's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_vrgd.moments.chan import Moments
from ds_vrgd.moments.sharded import ShardedMoments


class SeparateMoments:
    """One exchange of the parameters that all ranks share, and one for each set of experts.

    Collectives come in one order on every rank: the first exchange may start its own during a backward pass, and the
    others theirs at its end, one after the other.

    Args:
        parts: which of the optimizer's tensors each exchange serves; the first one counts the chunks.
    """

    def __init__(self, parts: Sequence[tuple[ShardedMoments, set[Tensor]]]) -> None:
        self._parts = [exchange for exchange, _ in parts]
        self._of = {tensor: exchange for exchange, tensors in parts for tensor in tensors}

    def end_micro_batch(self) -> None:
        """Close the micro-batch of every exchange."""
        for exchange in self._parts:
            exchange.end_micro_batch()

    def finish(self) -> int:
        """Number of chunks of the parameters that all ranks share; a collective."""
        shared, *_ = [exchange.finish() for exchange in self._parts]
        return shared

    def moments(self, shard: Tensor) -> Moments:
        """As :meth:`ShardedMoments.moments`."""
        return self._of.get(shard, self._parts[0]).moments(shard)

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held now: of moments, and of buffers."""
        held = [exchange.held_bytes() for exchange in self._parts]
        return sum(moments for moments, _ in held), sum(buffers for _, buffers in held)

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes that this rank sends to others: in a micro-batch, and once a window."""
        sent = [exchange.sent_bytes() for exchange in self._parts]
        return sum(often for often, _ in sent), sum(once for _, once in sent)

    def reset(self) -> None:
        """Begin the next window."""
        for exchange in self._parts:
            exchange.reset()
