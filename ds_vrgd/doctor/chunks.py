"""Chunk gradients from a plain copy of the model: no engine, no hook, no rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def loss_of(model: Any, batch: Any) -> Tensor:
    """The loss that a model, or an engine around it, gives for a batch: a tensor, a tuple or a mapping of arguments.

    Raises:
        TypeError: the model returns neither a loss nor something with ``.loss``.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"the model returns {type(output).__name__}: return the loss, or something that has .loss")
    return loss


def chunk_gradients(
    plain: nn.Module, micro_batches: Sequence[Any], scale: float, seed: int | None = None
) -> list[dict[str, Tensor]]:
    """One plain backward pass a micro-batch, in the model's dtype; the loss is multiplied by ``scale`` before it.

    Args:
        plain: the copy, holding the engine's weights.
        micro_batches: all of a step, over ranks and accumulation, on the copy's device.
        scale: what the engine multiplies the loss by; divided out again in the result.
        seed: of the first micro-batch's random numbers, one more for each further one; None to leave them alone.

    Returns:
        For each micro-batch the gradients by name, on the CPU in float64.
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
    """2-norm of all of them together."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).norm())
