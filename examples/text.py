"""Real text that needs no download: this repository's own pages, as bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256


def pages() -> Tensor:
    """Return all pages, one after the other: ``(bytes,)``, int64."""
    root = Path(__file__).resolve().parents[1]
    text = b"\n".join(path.read_bytes() for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def blocks(length: int) -> Tensor:
    """Return the pages cut into ``(blocks, length)``, without the incomplete block at the end."""
    text = pages()
    return text[: len(text) // length * length].view(-1, length)


def unigram_entropy() -> float:
    """Return the loss in nats of a model that knows how often each byte occurs, and nothing about its neighbours."""
    share = torch.bincount(pages(), minlength=VOCABULARY).double() / len(pages())
    return float(torch.special.entr(share).sum())
