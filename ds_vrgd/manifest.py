"""``manifest.json``: the size and sha256 of every other file of a checkpoint or of prepared data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "manifest.json"


class Fingerprint(NamedTuple):
    """The size of a file in bytes and its sha256 in hexadecimal, to compare when it is read again."""

    size: int
    sha256: str

    def difference(self, path: Path) -> str | None:
        """Return how the file at ``path`` differs, or None. A file of another size is not read."""
        try:
            if (size := path.stat().st_size) != self.size:
                return f"has {size} bytes, not {self.size}"
            sha256 = sha256_of(path)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        return None if sha256 == self.sha256 else f"has sha256 {sha256}, not {self.sha256}"


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def has_manifest(folder: Path) -> bool:
    """Return whether a folder was completed: its manifest is written last."""
    return (folder / MANIFEST).is_file()


def files_of(folder: Path) -> dict[str, Fingerprint]:
    """Return the fingerprints of a folder's files, by path within the folder.

    Raises:
        OSError, ValueError: its manifest cannot be read.
    """
    content = read_json(folder / MANIFEST)
    files = content.get("files") if isinstance(content, dict) else None
    if not files or not isinstance(files, dict):
        raise ValueError('it has no "files" by name')
    for name, file in files.items():
        is_right = isinstance(file, dict) and set(file) == {"size", "sha256"} and isinstance(file["size"], int)
        if not is_right or not isinstance(file["sha256"], str):
            raise ValueError(f"it has no size and sha256 for {name}")
    return {name: Fingerprint(**file) for name, file in files.items()}


def first_fault(folder: Path, share: int = 0, shares: int = 1, only: str | None = None) -> str | None:
    """Return the first file of a checkpoint or of prepared data that is not as it was saved; None if all are.

    This is process ``share`` of ``shares`` that look at every ``shares``-th file each; ``only`` names a single file.
    """
    if not folder.is_dir():
        return "its folder is not there"
    if not has_manifest(folder):
        return f"{MANIFEST} is not there, so it was never completed"
    try:
        files = files_of(folder)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} is damaged ({error})"
    names = [name for name in files if only in (None, name)]
    for name in names[share::shares]:
        if (difference := files[name].difference(folder / name)) is not None:
            return f"{name} {difference}"
    return f"{only} is not part of it" if only is not None and not names else None
