"""The results of one run: a JSON file that is complete after every row, so that a timeout loses nothing."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

#: The parts of a run, each a list of rows in its file.
PARTS = ("collectives", "kernels", "steps")


class Record:
    """A run's file, written by the first rank; on the others rows go nowhere.

    Args:
        path: the file, or None to write nothing. One that exists is gone on with: a run has processes one behind the
            other.
        environment: what every row was measured with; that of an existing file stays.
    """

    def __init__(self, path: Path | None, environment: dict[str, Any]) -> None:
        self._path = path
        self._run: dict[str, Any] = {"environment": environment} | {part: [] for part in PARTS}
        if path is not None and path.exists():
            self._run = json.loads(path.read_text())

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Take one row and write the file."""
        self._run.setdefault(part, []).append(row)
        if self._path is not None:
            write_whole(self._path, json.dumps(self._run, indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write the whole file or nothing: a kill leaves the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def file_name() -> str:
    """Return the path of a run that begins now; names sort by time."""
    return f"run-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return every run of a folder, oldest first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("run-*.json"))]


def environment(command: str, ranks: int, device: torch.device) -> dict[str, Any]:
    """Return card, versions, command and date."""
    on_gpu = device.type == "cuda"
    return {
        "command": command,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "ranks": ranks,
        "card": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else 0,
        "versions": {
            "ds_vrgd": _commit() or _version("ds_vrgd"),
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or "none",
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
            "DeepSpeed": _version("deepspeed"),
            "Megatron-Core": _version("megatron-core"),
            "triton": _version("triton"),
            "transformers": _version("transformers"),
            "Python": platform.python_version(),
        },
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _commit() -> str | None:
    """Return the commit of this checkout, where it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
