"""A text that a model with context can learn: every token is the one before plus one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evidence.language_model import Text

PIECES, LENGTH, MASK = 24, 8, 0


def counting_text() -> Text:
    """Return 512 rows for training, and 16 held-out ones; all tokens but the mask are equally frequent."""

    def rows(count: int, seed: int) -> Tensor:
        starts = torch.randint(1, PIECES, (count, 1), generator=torch.Generator().manual_seed(seed))
        return (starts + torch.arange(LENGTH) - 1) % (PIECES - 1) + 1

    frequencies = torch.full((PIECES,), -math.log(PIECES - 1), dtype=torch.float64)
    return Text(rows(512, 0), rows(16, 1), frequencies, MASK)
