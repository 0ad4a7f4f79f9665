"""DeepSpeed's ``save_checkpoint`` where a write may fail on one rank alone.

DeepSpeed has barriers (and a gather at stage 3) after the writes. A rank that left them with an exception would leave
the other ranks waiting. Here the rank keeps the error, writes nothing more, and takes part in every collective.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Written:
    """A checkpoint engine that keeps errors instead of raising them; everything else is DeepSpeed's own.

    Attributes:
        files: those that this rank has written, in order; complete only without an error.
        error: the first failure on this rank, with its file; None without one.
    """

    def __init__(self, inner: Any) -> None:
        self.files: list[Path] = []
        self.error: str | None = None
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def attempt(self, path: str, write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Do one write, unless an earlier one failed."""
        if self.error is not None:
            return
        try:
            write(*args, **kwargs)
        except Exception as error:  # of any kind: the other ranks must not be left waiting
            self.error = f"{path}: {error.strerror if isinstance(error, OSError) else error}"
            if "unexpected pos" in self.error:
                self.error += " (torch reports this when the file system takes no more: a full disk, or a quota)"

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        self.attempt(path, self._inner.makedirs, path, exist_ok=exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file."""
        self.attempt(path, self._inner.save, state_dict, path)
        self.files.append(Path(path))


def save_checkpoint(engine: Any, folder: Path, tag: str, client_state: dict[str, Any]) -> Written:
    """Call ``engine.save_checkpoint`` without the file ``latest``, and without an exception on one rank alone.

    Collective. Compare ``Written.error`` over all ranks before you rely on the checkpoint. With the optimizer on NVMe
    DeepSpeed copies files by other means, whose errors are raised where they happen.

    Raises:
        ValueError: a writer in the DeepSpeed JSON writes in the background, so the outcome is unknown on return.
    """
    inner, copy_script = engine.checkpoint_engine, engine._copy_recovery_script
    if inner.is_decoupled():
        raise ValueError(
            f"checkpoints are written in the background by {type(inner).__name__}, so whether they are whole cannot be "
            'known in time. Remove "decoupled" from checkpoint.writer, or "datastates_ckpt", in the DeepSpeed JSON'
        )
    engine.checkpoint_engine = written = Written(inner)
    engine._copy_recovery_script = lambda path: written.attempt(path, copy_script, path)
    try:
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    finally:
        engine.checkpoint_engine = inner
        del engine._copy_recovery_script
    return written
