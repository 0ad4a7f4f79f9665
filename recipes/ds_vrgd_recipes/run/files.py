"""Files that exist whole or not at all, also after a crash or a full disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ds_vrgd.manifest import Fingerprint, sha256_of


def fingerprint(path: Path) -> Fingerprint:
    """Force a file to the disk and read it back.

    Raises:
        OSError: it cannot be read, or the disk reports only now that it is full.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return Fingerprint(path.stat().st_size, sha256_of(path))


def write_text(path: Path, text: str) -> None:
    """Write or replace a file: a reader, or the next start, finds the old text or the new one, never a part."""
    write_binary(path, lambda file: file.write(text.encode()))
    sync_folder(path.parent)


def write_binary(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write or replace a file by ``write``, as ``write_text`` does, without forcing its name to the disk.

    Args:
        write: is called with the open file.

    Raises:
        OSError: it cannot be written; nothing of it remains.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def shortened(value: Any, most: int = 80) -> str:
    """Return a value as a message quotes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: without this a power failure may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
