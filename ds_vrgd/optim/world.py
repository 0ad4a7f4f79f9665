"""This process among the others, where ``torch.distributed`` runs; else alone."""

from __future__ import annotations

from typing import Any

import torch


def group() -> Any | None:
    """The process group of all ranks; None for a single process."""
    spread = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if spread else None


def is_first() -> bool:
    """Whether this is the process that speaks for all."""
    return group() is None or torch.distributed.get_rank() == 0
