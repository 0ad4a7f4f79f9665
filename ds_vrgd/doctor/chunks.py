"""Chunk gradients of a plain copy of the model (no engine, no hook, no rank), and those that the engine computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def loss_of(model: Any, batch: Any) -> Tensor:
    """Return the loss of a model, or of an engine around it. The batch is a tensor, or a tuple or mapping of arguments.

    Raises:
        TypeError: the model returns neither a loss nor something with ``.loss``.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
        raise TypeError(f"the model returns {found}: return the loss, one number, or an object with .loss")
    return loss


def chunk_gradients(
    plain: nn.Module, micro_batches: Sequence[Any], scale: float, seed: int | None = None
) -> list[dict[str, Tensor]]:
    """Return the gradients of one plain backward pass per micro-batch, by name, on the CPU in float64.

    The copy has the engine's weights, and computes in their dtype; the micro-batches are all of a step, over ranks and
    accumulation, on its device. ``scale`` is the engine's factor of the loss; the result is divided by it again.
    ``seed`` is that of the first micro-batch, one more for each further one; None to set none.
    """
    chunks = []
    for index, batch in enumerate(micro_batches):
        plain.zero_grad()
        if seed is not None:
            torch.manual_seed(seed + index)
        (loss_of(plain, batch) * scale).backward()
        chunks.append({n: p.grad.cpu().double() / scale for n, p in plain.named_parameters() if p.grad is not None})
    return chunks


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the 2-norm of all tensors together."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())


class SeenGradients:
    """Collects the engine's own chunk gradients, each as autograd hands it out: before any reduction."""

    def __init__(self, module: nn.Module) -> None:
        self._open: dict[str, Tensor] = {}
        self._chunks: list[dict[str, Tensor]] = []
        for name, param in module.named_parameters():
            if param.requires_grad:
                param.register_hook(lambda grad, name=name: self._see(name, grad))

    def _see(self, name: str, grad: Tensor) -> None:
        seen = grad.detach().cpu().double()  # a copy; a parameter in reentrant checkpoints is seen in pieces
        self._open[name] = self._open[name] + seen if name in self._open else seen

    def end_chunk(self, scale: float) -> None:
        """End a backward pass, whose loss was multiplied by ``scale``."""
        self._chunks.append({name: grad / scale for name, grad in self._open.items()})
        self._open = {}

    def collect(self) -> list[dict[str, Tensor]]:
        """Return all ranks' chunks by micro-batch on rank 0, nothing elsewhere, and clear them; a collective."""
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        mine, self._chunks = self._chunks, []
        everyone: list[Any] | None = [None] * world if rank == 0 else None
        torch.distributed.gather_object(mine, everyone, dst=0)
        return [chunk for chunks in zip(*everyone, strict=True) for chunk in chunks] if everyone else []


def difference(chunks: Sequence[Mapping[str, Tensor]], others: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest |g - h| / |h| of two gradients of a chunk; infinite if one lacks a layer or is not finite."""
    largest = 0.0
    for chunk, other in zip(chunks, others, strict=True):
        if set(chunk) != set(other):
            return math.inf
        size = norm_of(list(other.values()))
        apart = norm_of([chunk[name] - grad for name, grad in other.items()])
        ratio = apart / size if size > 0 else apart
        largest = max(largest, math.inf if math.isnan(ratio) else ratio)
    return largest
