"""A small attention model whose sequences are cut over ranks by DeepSpeed Ulysses, and the same model uncut."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

VOCABULARY, HEADS, HEAD, LENGTH = 61, 4, 3, 8
WIDTH = HEADS * HEAD


class Attention(nn.Module):
    """Causal attention of whole sequences; ``(length, batch, heads, head)`` each."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


class SequenceLM(nn.Module):
    """One block; an output head tied to the embedding; a weight with a gradient on the first part of a sequence alone.

    Args:
        group: of the ranks that share a sequence; None to compute whole sequences.
    """

    def __init__(self, group: Any | None = None) -> None:
        super().__init__()
        self.parts = 1 if group is None else torch.distributed.get_world_size(group)
        self.part = 0 if group is None else torch.distributed.get_rank(group)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.first = nn.Parameter(torch.empty(WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a key's bias has no gradient but rounding
        self.attention = Attention() if group is None else DistributedAttention(Attention(), group)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the mean next-token loss of ``(batch, LENGTH + 1)`` tokens; they add up."""
        size = LENGTH // self.parts
        places = torch.arange(self.part * size, (self.part + 1) * size, device=tokens.device)
        x = self.tokens(tokens[:, places]) + self.positions(places) + self.first * (places == 0).unsqueeze(1)
        x = x.transpose(0, 1)
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).contiguous() for t in self.qkv(x).chunk(3, dim=-1))
        mixed = self.attention(q, k, v) if self.parts == 1 else self.attention(q, k, v, 1)
        x = self.norm(x + self.out(mixed.flatten(-2))).transpose(0, 1)
        losses = nn.functional.cross_entropy(
            self.head(x).float().flatten(0, 1), tokens[:, places + 1].flatten(), reduction="sum"
        )
        return losses / (tokens.shape[0] * LENGTH)


def make_sequence_model(group: Any | None = None) -> SequenceLM:
    """Return the model, with the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(4321)
        model = SequenceLM(group)
        nn.init.normal_(model.first, std=0.1)
        with torch.no_grad():
            model.tokens.weight.mul_(0.3)
    return model


def sequence_batches(step: int, count: int) -> list[Tensor]:
    """Return ``count`` micro-batches of ``(2, LENGTH + 1)`` token numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(700 + step)
    return list(torch.randint(0, VOCABULARY, (count, 2, LENGTH + 1), generator=generator))
