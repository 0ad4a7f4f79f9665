"""What a checkpoint, or prepared data, consists of: ``manifest.json``, the size and sha256 of every other file."""

from __future__ import annotations

import json
from pathlib import Path

from ds_vrgd.training.files import Fingerprint, write_text

_MANIFEST = "manifest.json"


def has_manifest(folder: Path) -> bool:
    """Whether a checkpoint was completed: its manifest is written last."""
    return (folder / _MANIFEST).is_file()


def write_manifest(folder: Path, files: dict[str, Fingerprint]) -> None:
    """Complete a checkpoint, atomically.

    Args:
        files: by path within ``folder``.
    """
    content = {"files": {name: files[name].as_json() for name in sorted(files)}}
    write_text(folder / _MANIFEST, json.dumps(content, indent=1) + "\n")


def remove_manifest(folder: Path) -> None:
    """Take the first step of deleting a checkpoint: what is left of it no longer looks like one."""
    (folder / _MANIFEST).unlink()


def saved_bytes(folder: Path) -> int:
    """Size of a complete checkpoint."""
    return sum(file.size for file in _read(folder).values())


def first_fault(folder: Path, share: int = 0, shares: int = 1, only: str | None = None) -> str | None:
    """The first file of a folder that is not as it was saved, with what was found and expected; None if all are.

    Args:
        share: of ``shares`` processes that look at every ``shares``-th file each.
        only: look at this file alone.
    """
    if not folder.is_dir():
        return "its folder is not there"
    if not has_manifest(folder):
        return f"{_MANIFEST} is not there, so it was never completed"
    try:
        files = _read(folder)
    except (ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} is damaged ({error})"
    names = [name for name in files if only in (None, name)]
    for name in names[share::shares]:
        difference = files[name].difference(folder / name)
        if difference is not None:
            return f"{name} {difference}"
    if only is not None and not names:
        return f"{only} is not part of it"
    return None


def _read(folder: Path) -> dict[str, Fingerprint]:
    content = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    return {name: Fingerprint(**file) for name, file in content["files"].items()}
