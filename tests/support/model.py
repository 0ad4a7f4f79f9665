"""A small model with everything that breaks sharded statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, POSITIONS, WIDTH, HIDDEN, LENGTH = 83, 17, 13, 11, 5


class TinyLM(nn.Module):
    """Odd sizes; a position table with unused rows; LayerNorm; an output head tied to the embedding; a frozen weight.

    The embedding is two thirds of its param group, so that three ranks' shards cut it in three.

    Args:
        checkpointing: None, "reentrant" or "non-reentrant" around the hidden layers.
    """

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def _hidden(self, x: Tensor) -> Tensor:
        return self.frozen(x + self.down(self.norm(torch.tanh(self.up(x)))))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-token loss of ``(batch, LENGTH + 1)`` token numbers."""
        places = torch.arange(LENGTH, device=tokens.device)
        x = self.tokens(tokens[:, :-1]) + self.positions(places)
        if self.checkpointing:
            x = checkpoint(self._hidden, x, use_reentrant=self.checkpointing == "reentrant")
        else:
            x = self._hidden(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_model(checkpointing: str | None = None) -> TinyLM:
    """Return the model, with the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        model = TinyLM(checkpointing)
        with torch.no_grad():
            model.tokens.weight.mul_(0.3)
    return model


def param_groups(model: nn.Module, **without_decay: Any) -> list[dict[str, Any]]:
    """Return matrices in one group; biases and normalisation, without decay, in another."""
    decayed = [
        p for p in model.parameters() if (p.requires_grad and p.dim() != 1) or len(getattr(p, "ds_shape", [0])) > 1
    ]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is d for d in decayed)]
    return [{"params": decayed}, {"params": others, "weight_decay": 0.0, **without_decay}]


def batches(step: int, count: int, size: int = 4) -> list[Tensor]:
    """Return ``count`` micro-batches of step ``step``: ``(size, LENGTH + 1)`` token numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(9000 + step)
    tokens = torch.randint(0, VOCABULARY - 20, (count, size, LENGTH + 1), generator=generator)
    return list(tokens)


class OutOfMemory(torch.autograd.Function):
    """A layer that fails in the backward pass, when the layers above have their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("out of memory")
