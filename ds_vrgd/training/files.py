"""Files that are there whole or not at all, also after a crash or a full disk."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

_PIECE = 1 << 24  # bytes read at once


@dataclass(frozen=True)
class Fingerprint:
    """What a file must still have when it is read again: its size in bytes and its sha256 in hexadecimal."""

    size: int
    sha256: str

    def difference(self, path: Path) -> str | None:
        """How the file at ``path`` differs, or None. The size is compared first: a short file is not read."""
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"has {size} bytes, not {self.size}"
            sha256 = sha256_of(path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None if sha256 == self.sha256 else f"has sha256 {sha256}, not {self.sha256}"

    def as_json(self) -> dict[str, int | str]:
        """The two values by their names."""
        return asdict(self)


def fingerprint(path: Path) -> Fingerprint:
    """Force a file to the disk and read it back.

    Raises:
        OSError: it cannot be read, or the disk turns out to be full only now.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return Fingerprint(path.stat().st_size, sha256_of(path))


def write_text(path: Path, text: str) -> None:
    """Write or replace a file so that a reader, or the next start, finds the old text or the new one, never a part."""
    write_binary(path, lambda file: file.write(text.encode()))
    sync_folder(path.parent)


def write_binary(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Make or replace a file by ``write``, which gets it open: as in ``write_text``, but for the folder's names.

    Raises:
        OSError: it cannot be written; nothing is left of it.
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


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk: a rename is not there after a power failure without it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """sha256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
