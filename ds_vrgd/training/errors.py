"""The ways in which a run ends early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path


class InputError(ValueError):
    """Something the user gave cannot be used. The message names the setting, its value and the way out.

    The launcher prints the message alone, without a traceback, and ends with exit status 2.
    """


class PreparationFailed(RuntimeError):
    """The data cannot be prepared now: the disk is full, or a process was killed. The same command goes on later."""


class TrainingFailed(RuntimeError):
    """The run cannot go on: the loss is not finite, fp16 skips every update, or a checkpoint cannot be written."""


class Interrupted(Exception):
    """SIGTERM came and the run is saved: not an error, exit status 0."""

    def __init__(self, step: int, output: Path) -> None:
        super().__init__(
            f"SIGTERM: saved after update {step} and stopped; go on with the same command and --resume {output}"
        )


def require_finite(losses: Sequence[float], step: int, way_out: str) -> None:
    """Stop a run that has come apart. Give it the losses of all ranks, so that every rank stops.

    Raises:
        TrainingFailed: one is NaN or infinite; says what to do.
    """
    if not all(math.isfinite(loss) for loss in losses):
        raise TrainingFailed(f"update {step}: the loss is {sum(losses)}; {way_out}")
