"""The moments of a window on this rank's shards, and what an exchange brings for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from ds_vrgd.moments.buckets import Bucket, Piece
from ds_vrgd.moments.chan import merge_chunks_


class Sink(Protocol):
    """Where received gradients are merged."""

    def open(self, bucket: Bucket) -> None:
        """Have memory for what ``bucket`` will bring."""

    def merge(self, bucket: Bucket, received: Tensor, parts: int) -> None:
        """Merge one micro-batch, ``(chunks, own)``, into the ``parts`` before it."""

    def finish(self, parts: int) -> None:
        """Bring the shards' moments up to date; a collective where nodes have to talk."""

    def nbytes(self) -> int:
        """Bytes held now."""

    def sent_bytes(self) -> int:
        """Bytes that :meth:`finish` sends to other ranks."""

    def close(self) -> None:
        """Let go of all memory."""


class ShardStore:
    """``total`` and ``m2`` of every shard, from its first bucket in a window to the window's end.

    Args:
        buckets: all there are.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._pieces: dict[Tensor, list[Piece]] = {}
        self._like: dict[Tensor, tuple[torch.dtype, torch.device]] = {}
        for bucket in buckets:
            for piece in bucket.pieces:
                self._pieces.setdefault(piece.shard, []).append(piece)
                dtype, _ = self._like.get(piece.shard, (torch.float32, None))
                self._like[piece.shard] = torch.promote_types(bucket.dtype, dtype), bucket.device
        self._gaps = {shard: _gaps(shard, pieces) for shard, pieces in self._pieces.items()}
        self._held: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def open(self, bucket: Bucket) -> None:
        """Have memory for the shards of ``bucket``: zero in their padding, anything elsewhere."""
        for shard in {piece.shard: None for piece in bucket.pieces}:
            if shard not in self._held:
                dtype, device = self._like[shard]
                total, m2 = (torch.empty(shard.numel(), dtype=dtype, device=device) for _ in range(2))
                gaps = [moment[start:end] for moment in (total, m2) for start, end in self._gaps[shard]]
                if gaps:
                    torch._foreach_zero_(gaps)
                self._held[shard] = total, m2

    def views(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """``total`` and ``m2`` where ``piece`` is."""
        total, m2 = self._held[piece.shard]
        end = piece.shard_start + piece.numel
        return total[piece.shard_start : end], m2[piece.shard_start : end]

    def merge(self, bucket: Bucket, received: Tensor, parts: int) -> None:
        """Merge one micro-batch of all ranks' chunk gradients, ``(chunks, own)``."""
        for piece in bucket.pieces:
            total, m2 = self.views(piece)
            merge_chunks_(received[:, piece.start : piece.start + piece.numel], total, m2, parts)

    def finish(self, parts: int) -> None:
        """Every micro-batch has been merged already."""

    def of(self, shard: Tensor) -> tuple[Tensor, Tensor] | None:
        """``total`` and ``m2`` of a shard; None if nothing has come for it."""
        return self._held.get(shard)

    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(moment.nbytes for held in self._held.values() for moment in held)

    def sent_bytes(self) -> int:
        """The shards talk to nobody."""
        return 0

    def close(self) -> None:
        """Let go of all memory."""
        self._held.clear()


def beside(shard: Tensor, moment: Tensor) -> Tensor:
    """``moment`` on ``shard``'s device: itself, or a copy of it.

    The copy is in page-locked memory where the shard's gradient is (DeepSpeed's ``offload_optimizer.pin_memory``): a
    GPU fills that many times faster than fresh pages, and torch keeps it for the next step.
    """
    if moment.device == shard.device:
        return moment
    pinned = shard.grad is not None and shard.grad.is_pinned()
    copy = torch.empty(moment.shape, dtype=moment.dtype, device=shard.device, pin_memory=pinned)
    return copy.copy_(moment)


def _gaps(shard: Tensor, pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """``(start, end)`` of what no piece of the shard covers."""
    gaps, end = [], 0
    for piece in sorted(pieces, key=lambda piece: piece.shard_start):
        if piece.shard_start > end:
            gaps.append((end, piece.shard_start))
        end = piece.shard_start + piece.numel
    if shard.numel() > end:
        gaps.append((end, shard.numel()))
    return gaps
