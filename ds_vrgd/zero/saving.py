"""DeepSpeed's ``save_checkpoint`` where a write may fail on one rank alone.

It has barriers (and at stage 3 a gather) behind the writes, so a rank that left it with an exception would leave the
others waiting there. Here the rank keeps the error, writes nothing more, and takes part in all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Engine = Any


@dataclass
class Written:
    """What this rank has written.

    Attributes:
        files: in the order of writing; whole only without an error.
        error: the first thing that went wrong on this rank, with its file.
    """

    files: list[Path] = field(default_factory=list)
    error: str | None = None

    def attempt(self, path: Path, write: Callable[[], Any]) -> None:
        """Do one write, unless an earlier one failed."""
        if self.error is not None:
            return
        try:
            write()
        except OSError as error:
            self.error = f"{path}: {error.strerror}"
        except Exception as error:  # whatever it is, the other ranks must not be left waiting
            self.error = f"{path}: {error}"
            if "unexpected pos" in self.error:
                self.error += " (what torch says when the file system takes no more: a full disk, or a quota)"


class _Keeper:
    """A checkpoint engine that keeps errors instead of raising them; everything else is DeepSpeed's own."""

    def __init__(self, inner: Any, written: Written) -> None:
        self._inner = inner
        self._written = written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._written.attempt(Path(path), lambda: self._inner.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        self._written.attempt(Path(path), lambda: self._inner.save(state_dict, path))
        self._written.files.append(Path(path))


def save_checkpoint(engine: Engine, folder: Path, tag: str, client_state: dict[str, Any]) -> Written:
    """``engine.save_checkpoint`` without the file ``latest``, and without an exception on one rank alone. Collective.

    The ranks have not agreed yet whether all is well: compare ``Written.error`` over all of them before the
    checkpoint is called one. (With the optimizer on NVMe DeepSpeed copies files by other means, whose errors are
    raised where they happen.)

    Raises:
        ValueError: a writer in the DeepSpeed JSON writes in the background, so that nothing is known on return.
    """
    inner = engine.checkpoint_engine
    if inner.is_decoupled():
        raise ValueError(
            f"checkpoints are written in the background by {type(inner).__name__}, so whether they are whole cannot be "
            'known in time; remove "decoupled" from checkpoint.writer, or "datastates_ckpt", in the DeepSpeed JSON'
        )
    written = Written()
    copy_script = engine._copy_recovery_script
    engine.checkpoint_engine = _Keeper(inner, written)
    engine._copy_recovery_script = lambda path: written.attempt(Path(path), lambda: copy_script(path))
    try:
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    finally:
        engine.checkpoint_engine = inner
        del engine._copy_recovery_script
    return written
