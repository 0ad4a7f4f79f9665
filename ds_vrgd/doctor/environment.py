"""The installed versions, and locks of killed compiles."""

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
    """Return the version of everything that influences the numbers."""
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
    """Return a warning for each lock in torch's cache of extensions; one of a killed compile hangs every start."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return [
        f"{lock} is {(time.time() - lock.stat().st_mtime) / 60:.0f} minutes old: programs that need this extension "
        "wait until it is gone. If nothing is being compiled now, a compile that was killed has left it: remove it"
        for lock in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])
    ]
