"""Prepared data of any training: its manifest, and whether the source has changed since."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_vrgd.training.errors import InputError


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"{folder} exists but holds no prepared data (no manifest.json); choose another prepared_data")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); remove {folder} and prepare the data again") from error
    return manifest


def check_source(setting: str, files: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Compare the sizes of source files with what ``folder`` was made of.

    A file that is no longer there is no fault: data may be prepared on another machine.

    Args:
        setting: that names the source, for the message.
        files: each with "path" and "size".

    Raises:
        InputError: a file has another size.
    """
    for file in files:
        path = Path(file["path"])
        if path.is_file() and path.stat().st_size != file["size"]:
            raise InputError(
                f"{setting}: {path} has {path.stat().st_size} bytes, and had {file['size']} when {folder} was made of "
                "it; restore it, or choose another prepared_data"
            )
