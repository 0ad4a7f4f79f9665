"""The ranks of ``torch.distributed``, and warnings that point to the user's own line."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch

#: Packages through which a program calls ``step()``: a warning points to the line that called them.
_BETWEEN = {
    "accelerate", "contextlib", "deepspeed", "ds_vrgd", "ds_vrgd_autoload", "functools", "importlib", "lightning",
    "pytorch_lightning", "torch", "transformers",
}  # fmt: skip


def group() -> Any | None:
    """Return the process group of all ranks; None for a single process."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


def is_first() -> bool:
    """Return whether this process logs and warns for all ranks."""
    return group() is None or torch.distributed.get_rank() == 0


def announce(message: str) -> None:
    """Log a line at the level INFO on the first rank; write it to stderr where the program has not set up logging."""
    if not is_first():
        return
    logger = logging.getLogger("ds_vrgd")
    if logger.level == logging.NOTSET and not logger.hasHandlers():
        print(f"ds_vrgd: {message}", file=sys.stderr, flush=True)
    else:
        logger.info(message)


def warn(message: str) -> None:
    """Warn about the line of the user's program that led here, whichever engine or trainer is in between."""
    frame = sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in _BETWEEN:
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno,
        module=names.get("__name__"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip
