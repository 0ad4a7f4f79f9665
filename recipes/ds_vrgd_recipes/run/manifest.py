"""``manifest.json``: what a checkpoint or prepared data consist of, the size and sha256 of every other file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_vrgd.manifest import MANIFEST, Fingerprint, files_of, first_fault, has_manifest, read_json
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import write_text
from ds_vrgd_recipes.run.ranks import Ranks


def write_manifest(folder: Path, files: dict[str, Fingerprint]) -> None:
    """Complete a checkpoint, atomically.

    Args:
        files: by path within ``folder``.
    """
    content = {"files": {name: files[name]._asdict() for name in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def remove_manifest(folder: Path) -> None:
    """Take the first step of deleting a checkpoint: the rest of it no longer looks like one."""
    (folder / MANIFEST).unlink()


def saved_bytes(folder: Path) -> int:
    """Return the size of a complete checkpoint.

    Raises:
        OSError, ValueError: its manifest cannot be read.
    """
    return sum(file.size for file in files_of(folder).values())


def read_prepared(folder: Path, version: int, section: str) -> dict[str, Any]:
    """Return the manifest of prepared data.

    Args:
        version: the "format" that it must have.
        section: a key that data of this kind have.

    Raises:
        InputError: there is none, it is damaged, or it is of another version or kind.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(f"{folder} exists but holds no prepared data (no manifest.json); choose another prepared_data")
    try:
        manifest: dict[str, Any] = read_json(path)
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); remove {folder} and prepare the data again") from error
    if manifest.get("format") != version or section not in manifest:
        raise InputError(
            f"{folder} was not prepared by this version ({section} of format {manifest.get('format')}, not {version}); "
            "remove it and prepare the data again"
        )
    return manifest


def check_prepared(
    folder: Path,
    setting: str,
    wanted: Mapping[str, Any],
    saved: Mapping[str, Any],
    files: Iterable[Mapping[str, Any]],
) -> None:
    """Compare settings, and the sizes of source files, with those that ``folder`` was prepared with.

    A file that is no longer there is no fault: data may be prepared on another machine.

    Args:
        setting: key of the run file that names the source.
        wanted, saved: the settings now and then, by their names in messages.
        files: each with "path" and "size".

    Raises:
        InputError: a setting or a size differs.
    """
    for key, value in wanted.items():
        if saved.get(key) != value:
            raise InputError(
                f"{key}={value}, but {folder} was prepared with {saved.get(key)}; restore the setting, or choose "
                "another prepared_data or --output"
            )
    for file in files:
        path = Path(file["path"])
        if path.is_file() and path.stat().st_size != file["size"]:
            raise InputError(
                f"{setting}: {path} has {path.stat().st_size} bytes, and had {file['size']} when {folder} was made of "
                "it; restore it, or choose another prepared_data"
            )


def verify_files(folder: Path, ranks: Ranks) -> None:
    """Compare every file of prepared data with its sha256, each rank a share of them. Collective.

    Raises:
        InputError: a file is not as it was written, or a rank does not see the folder, on every rank.
    """
    fault = first_fault(folder, ranks.rank, ranks.size)
    if not has_manifest(folder):
        fault = "it is not visible to every rank; put the output (or prepared_data) on a shared file system"
    elif fault is not None:
        fault += "; remove the folder and prepare the data again"
    if found := [each for each in ranks.gather(fault) if each is not None]:
        raise InputError(f"prepared data {folder}: {found[0]}")
