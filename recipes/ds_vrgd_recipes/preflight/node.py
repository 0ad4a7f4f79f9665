"""The properties of one rank's node that matter to a training."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

import ds_vrgd
from ds_vrgd.doctor.environment import stale_locks

_PACKAGES = ("torch", "deepspeed", "transformers")
_NOT_INSTALLED = "not installed"
# DeepSpeed's all-reduce on the CPU, NCCL's channels, torch's tensors between processes.
_SEGMENTS = ("deepspeed_allreduce_buffer*", "nccl-*", "torch_*")


@dataclass(frozen=True)
class Node:
    """A rank and its machine. Sizes are in bytes.

    Attributes:
        host: the machine's name.
        rank, local_rank: the numbers of the process.
        versions: the version, by name, of everything that must be the same on all nodes.
        gpus: the number of GPUs that this process sees; None on the CPU.
        gpu: name and memory of the rank's own GPU; None on the CPU.
        shm_size, shm_free: size and free space of /dev/shm; 0 where there is none.
        output_free: free space where the run writes.
        unwritable: why the run cannot write there; None if it can.
        locks: see :func:`ds_vrgd.doctor.environment.stale_locks`.
        segments: files in /dev/shm that a dead process left there.
    """

    host: str
    rank: int = 0
    local_rank: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    gpus: int | None = None
    gpu: tuple[str, int] | None = None
    shm_size: int = 0
    shm_free: int = 0
    output_free: int = 0
    unwritable: str | None = None
    locks: tuple[str, ...] = ()
    segments: tuple[str, ...] = ()


def look_around(output: Path, *, alone: bool) -> Node:
    """Return the node of this process.

    Args:
        output: folder that the run writes to, or will make.
        alone: this process is not a rank, and a job may be running on the machine: start nothing on a GPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = get_accelerator().device_name() != "cpu"
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    place = existing(output)
    return Node(
        host=socket.gethostname(),
        rank=int(os.environ.get("RANK", "0")),
        local_rank=local_rank,
        versions=installed(),
        gpus=torch.cuda.device_count() if on_gpu else None,
        gpu=None if alone or not on_gpu else _gpu(local_rank),
        shm_size=shm.total if shm else 0,
        shm_free=shm.free if shm else 0,
        output_free=shutil.disk_usage(place).free,
        unwritable=None if os.access(place, os.W_OK | os.X_OK) else f"{place} may not be written to",
        locks=tuple(stale_locks()),
        segments=tuple(left_segments()),
    )


def installed() -> dict[str, str]:
    """Return the versions of everything that affects the numbers, or whether the ranks can communicate."""
    found = {"Python": platform.python_version(), "ds_vrgd": ds_vrgd.__version__}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = _NOT_INSTALLED
    found["torch"] = torch.__version__  # with the CUDA that it was built for
    if get_accelerator().device_name() != "cpu" and torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver_version() or "unknown"
    return found


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's kernel driver, from the first line of its file; None where there is none."""
    with suppress(OSError):
        for word in path.read_text(encoding="utf-8").partition("\n")[0].split():
            if word[0].isdigit() and "." in word:
                return word
    return None


def existing(folder: Path) -> Path:
    """Return the nearest folder that exists, from ``folder`` upwards."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def left_segments(shm: Path = Path("/dev/shm"), processes: Path = Path("/proc")) -> list[str]:
    """Return this user's shared memory of DeepSpeed, NCCL or torch that no process has mapped or open.

    A job that was killed leaves it behind. Processes of other containers cannot be seen from here.
    """
    mine = {
        str(path)
        for pattern in _SEGMENTS
        for path in shm.glob(pattern)
        if path.is_file() and path.stat().st_uid == os.getuid()
    }
    for process in processes.glob("[0-9]*") if mine else ():
        with suppress(OSError):  # it has ended, or is another user's
            maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
            mine -= {path for path in mine if path in maps}
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):  # closed since, as the one that lists this folder is
                    mine.discard(str(descriptor.readlink()))
    return sorted(mine)


def _gpu(local_rank: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(local_rank)
    return properties.name, properties.total_memory
