"""What is installed, and what may be in the way."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import get_default_build_root

import ds_vrgd


def versions() -> dict[str, str]:
    """Of everything that has a say in the numbers."""
    return {
        "ds_vrgd": ds_vrgd.__version__,
        "DeepSpeed": deepspeed.__version__,
        "torch": torch.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "device": _device(),
    }


def _device() -> str:
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return f"CPU, {len(os.sched_getaffinity(0))} cores, gloo"
    if not torch.cuda.is_available():
        return str(accelerator.device_name())
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {nccl}"


def stale_locks() -> list[str]:
    """Locks in torch's cache of compiled extensions: whoever needs such an extension waits for its lock to go.

    A compile that was killed leaves its lock behind, and every later start hangs.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    found = []
    for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        minutes = (time.time() - lock.stat().st_mtime) / 60
        found.append(
            f"{lock} is {minutes:.0f} minutes old: programs that need this extension wait until it is gone. If nothing "
            "is being compiled now, it is left over from a compile that was killed: remove it"
        )
    return found
