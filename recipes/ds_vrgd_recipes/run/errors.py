"""The ways in which a run ends early."""

from __future__ import annotations

from pathlib import Path


class InputError(ValueError):
    """Something that the user gave cannot be used. The message names the setting, its value and the way out.

    The launcher prints the message alone, without a traceback, and ends with exit status 2.
    """


class PreparationFailed(RuntimeError):
    """The data cannot be prepared now: the disk is full, or a process was killed. The same command resumes later."""


class TrainingFailed(RuntimeError):
    """The run cannot continue: a loss is not finite, fp16 skips every update, or a checkpoint cannot be written."""


class Interrupted(Exception):
    """SIGTERM came and the run is saved: not an error, exit status 0."""

    def __init__(self, step: int, output: Path) -> None:
        super().__init__(
            f"SIGTERM: saved after update {step} and stopped; resume with the same command and --resume {output}"
        )
