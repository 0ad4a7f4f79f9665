"""A window with a gradient that is not finite: is there one, where did it arise, and what is said about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import ChunkNorms
from ds_vrgd.optim import world

# Layers of one chunk and chunks that a message names; a NaN in the loss is in every layer.
MOST_LAYERS = 3
MOST_CHUNKS = 8


@dataclass(frozen=True)
class BadGradient:
    """One layer's gradient of one chunk that is not finite.

    Attributes:
        rank: global rank that computed it.
        micro_batch: its number in the window, from 0.
        layer: name of the parameter.
        kind: "NaN" or "inf".
    """

    rank: int
    micro_batch: int
    layer: str
    kind: str


def any_rank_has_bad(norms: ChunkNorms, grads: Sequence[Tensor], group: Any | None, device: torch.device) -> bool:
    """Whether a chunk, or the gradient made of the chunks, is not finite on any rank. A collective; waits for it.

    Args:
        norms: of this rank's chunks.
        grads: what ``step()`` was handed, without padding: another one than the chunks' if the caller has changed it.
        group: of all ranks that step together; None for one process.
        device: on which the ranks can talk to each other.
    """
    handed = ChunkNorms()
    handed.note(0, [(grad, grad) for grad in grads])
    flag = (norms.any_bad(device) | handed.any_bad(device)).to(torch.uint8)
    if group is not None:
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
    return bool(flag)


def gather_bad(norms: ChunkNorms | None, name_of: Callable[[Tensor], str], group: Any | None) -> list[BadGradient]:
    """Every rank's bad gradients, on every rank, by rank and in the order of the backward pass. A collective."""
    rank = 0 if group is None else torch.distributed.get_rank()
    mine = [BadGradient(rank, index, name_of(param), kind) for param, index, kind in (norms.bad() if norms else ())]
    if group is None:
        return mine
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, mine, group=group)
    return [bad for of_rank in everyone for bad in of_rank]


def complain(optimizer: str, policy: str, found: Iterable[BadGradient]) -> FloatingPointError | None:
    """Name the chunks of a window that is left out: in one warning of the first rank, or in the error to be raised.

    Args:
        optimizer: name of its class.
        policy: the argument ``nonfinite``.
        found: of all ranks.
    """
    chunks = _where(found)
    if policy == "error":
        return FloatingPointError(
            f'the gradient of this step is not finite ({chunks}). nonfinite="error" stops before any weight is '
            'updated; "skip" would leave the step out and go on.'
        )
    if world.is_first():
        logging.getLogger("ds_vrgd").warning("%s skips a step whose gradient is not finite: %s", optimizer, chunks)
    return None


def _where(found: Iterable[BadGradient]) -> str:
    """The chunks and layers in words."""
    chunks: dict[tuple[int, int], list[BadGradient]] = {}
    for bad in found:
        chunks.setdefault((bad.rank, bad.micro_batch), []).append(bad)
    lines = []
    for (rank, micro_batch), layers in list(chunks.items())[:MOST_CHUNKS]:
        named = ", ".join(f"{bad.kind} in '{bad.layer}'" for bad in layers[:MOST_LAYERS])
        rest = len(layers) - MOST_LAYERS
        more = f" and {rest} more layer{'s' if rest > 1 else ''} behind" if rest > 0 else ""
        lines.append(f"rank {rank}, micro-batch {micro_batch + 1} of the window: {named}{more}")
    if len(chunks) > MOST_CHUNKS:
        lines.append(f"{len(chunks) - MOST_CHUNKS} more chunks")
    if not lines:
        return "no chunk that was observed holds a NaN or an infinity: it came in with their sum, or behind it"
    return "; ".join(lines)
