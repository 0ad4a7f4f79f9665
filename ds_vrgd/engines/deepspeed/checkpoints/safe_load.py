"""Read files that ``torch.save`` wrote without running anything that they name.

A pickle may name any function and have it called. DeepSpeed reads its checkpoints with ``weights_only=False`` and so
calls it. Everything here reads with torch's restricted unpickler, which rebuilds tensors, plain values and the classes
of :data:`PLAIN`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

#: What DeepSpeed and training programs save in addition to tensors and plain values: DeepSpeed's loss scale, stage and
#: slices; numpy's numbers and arrays (states of random generators); argparse's arguments (Megatron's). Rebuilding them
#: sets attributes and runs nothing else.
PLAIN: tuple[Any, ...] = (
    LossScaler,
    DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    argparse.Namespace,
    numpy.zeros(0).__reduce__()[0],
    numpy.float64(0).__reduce__()[0],
    numpy.ndarray,
    numpy.dtype,
    *{type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + numpy.typecodes["AllFloat"] + "?"},
)


class CheckpointError(ValueError):
    """A checkpoint that is incomplete or damaged, would run a program, or cannot be carried over without loss."""


@contextmanager
def run_nothing() -> Iterator[None]:
    """Have every ``torch.load`` in the block read tensors and plain values alone, whatever its caller asks for.

    ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` is torch's own switch for callers that pass ``weights_only=False``, as DeepSpeed
    does. A file that needs more raises ``pickle.UnpicklingError``.
    """
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(list(PLAIN)):
            yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def read_plain(path: Path) -> Any:
    """Return the content of one file; its tensors are read from the disk when they are used.

    Raises:
        CheckpointError: the file is missing or damaged, or names something that is not plain. Nothing was run.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another one")
    try:
        with run_nothing():
            return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_refusal(path, error)) from None
    except Exception as error:  # a damaged pickle raises whatever its remains lead to
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} is damaged ({first_line}). Use another checkpoint") from error


def _refusal(path: Path, error: pickle.UnpicklingError) -> str:
    """Return why a file was not read."""
    names = re.findall(r"GLOBAL ([\w.]+)", str(error))[:1]  # the first one, which is all that torch names
    with suppress(Exception), run_nothing():
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) or names
    if not names:
        found = re.search(r"error:\s+(.+)", str(error))
        reason = str(error).splitlines()[0] if found is None else found[1]
        return f"{path} is damaged, or no file of tensors ({reason}). Nothing in it was run. Use another checkpoint"
    return (
        f"{path} names {', '.join(names)}, to be called when the file is read. A checkpoint holds tensors and plain "
        "values, so nothing of it was run: the file was altered, or a client state holds other objects. If they are "
        f"yours, allow them by torch.serialization.add_safe_globals([{', '.join(names)}]) before the load; else use "
        "another checkpoint"
    )
