"""DeepSpeed's configuration, batch sizes and CPU specifics, before the first update."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op
from ds_vrgd.engines.deepspeed.configs import read_config
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import shortened
from ds_vrgd_recipes.run.settings import ONE_GROUP, check_optimizer

# Sections of the JSON that DeepSpeed or this package read keys from.
_OBJECTS = {
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "torch_autocast",
    "checkpoint",
    "tensorboard",
    "csv_monitor",
}


@dataclass(frozen=True)
class Batches:
    """Batch sizes of a run, or of one of its phases, in examples.

    Attributes:
        global_batch: of one update.
        micro_batch: of one backward pass on one rank, a chunk.
        phase: where the run file has these sizes, for messages ("phase 2"); empty where it has no phases.
    """

    global_batch: int
    micro_batch: int
    phase: str = ""

    def accumulation_steps(self, ranks: int) -> int:
        """Return the micro-batches per rank and update.

        Raises:
            InputError: the global batch cannot be shared out evenly.
        """
        chunk = self.micro_batch * ranks
        if self.global_batch % chunk:
            below = self.global_batch // chunk * chunk
            nearest = f"{below} or {below + chunk}" if below else f"{chunk}"
            raise InputError(
                f"global_batch={self.global_batch} is not a multiple of micro_batch={self.micro_batch} x "
                f"ranks={ranks} = {chunk}; use global_batch {nearest}, or another micro_batch or number of ranks"
            )
        return self.global_batch // chunk


def configure_cpu_ranks() -> None:
    """On CPU only, use one thread per core over all ranks, and no shared-memory operation in DeepSpeed."""
    if get_accelerator().device_name() != "cpu":
        return
    leave_out_shared_memory_op()
    if "OMP_NUM_THREADS" not in os.environ:
        # Set by torchrun and ds_vrgd.engines.deepspeed.launchers, or by DeepSpeed's launcher.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))


def without_launcher() -> None:
    """Make a process that no launcher has started the only rank.

    DeepSpeed would use mpi4py, and still does where another MPI's ``mpirun`` has started several processes.
    """
    several = any(os.environ.get(name, "1") != "1" for name in ("PMI_SIZE", "MV2_COMM_WORLD_SIZE"))
    if several or {"RANK", "WORLD_SIZE"} & os.environ.keys():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update({name: str(value) for name, value in alone.items()})
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def load_deepspeed_config(path: Path) -> dict[str, Any]:
    """Read DeepSpeed's JSON and check what this run needs of it.

    Raises:
        InputError: it is not readable or not JSON, names no optimizer, or has a schedule of its own.
    """
    try:
        config = read_config(path)
    except ValueError as error:
        raise InputError(str(error)) from error
    for key in sorted(_OBJECTS & config.keys()):
        if not isinstance(config[key], dict):
            raise InputError(
                f"--deepspeed_config {path}: {key}={shortened(config[key])} is not an object; give {{...}}"
            )
    clipping = config.get("gradient_clipping", 0.0)
    if isinstance(clipping, bool) or not isinstance(clipping, (int, float)) or clipping < 0:
        raise InputError(
            f"--deepspeed_config {path}: gradient_clipping={shortened(clipping)} is not a number >= 0; give "
            "the largest norm of a gradient, or remove the key"
        )
    if not isinstance(config.get("optimizer", {}).get("type"), str):
        raise InputError(
            f'--deepspeed_config {path} names no optimizer; add "optimizer": {{"type": "VRLAMB", "params": ...}}'
        )
    if "scheduler" in config:
        raise InputError(
            f"--deepspeed_config {path} has a scheduler, and the run file sets the learning rate; remove "
            '"scheduler" from the JSON'
        )
    return config


def fill_deepspeed_config(
    config: dict[str, Any],
    batches: Sequence[Batches],
    index: int,
    ranks: int,
    output: Path,
    groups: Sequence[Mapping[str, Any]] = ONE_GROUP,
) -> dict[str, Any]:
    """Return the configuration for ``deepspeed.initialize``: batch sizes ``batches[index]``, monitors, "auto" values.

    ``bf16.enabled`` = "auto" means yes on an accelerator, and no on a CPU: few processors are fast in bf16.

    Args:
        batches: of every phase of the run; all are checked before the first phase costs hours.
        groups: options of the run's param groups, which are checked together with the optimizer's arguments.

    Raises:
        InputError: the optimizer's arguments are wrong, a batch size in the JSON contradicts the run file, the batch
            cannot be shared out evenly, or a VR optimizer would see a single chunk.
    """
    config = copy.deepcopy(config)
    check_optimizer(config, groups)
    _check_chunks(config, batches, ranks)
    for each in batches:
        for key, (setting, value) in _batch_sizes(each, ranks).items():
            given = config.get(key, "auto")
            if given not in ("auto", value):
                where = f"{each.phase} of the run file" if each.phase else "the run file"
                raise InputError(
                    f"{key}={given} in the DeepSpeed JSON contradicts {setting}={value} in {where}; remove {key} from "
                    'the JSON or set it to "auto"'
                )
    config.update({key: value for key, (_, value) in _batch_sizes(batches[index], ranks).items()})
    for monitor, folder in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
        config.setdefault(monitor, {"enabled": True, "output_path": str(output), "job_name": folder})
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"]["enabled"] = get_accelerator().device_name() != "cpu"
    return config


def reduces_variance(config: dict[str, Any]) -> bool:
    """Return whether the optimizer of a DeepSpeed JSON (of :func:`load_deepspeed_config`) measures GSNR."""
    optimizer = config["optimizer"]
    return bool(optimizer["type"].startswith("VR") and (optimizer.get("params") or {}).get("gamma", 0.0) != 1.0)


def _check_chunks(config: dict[str, Any], batches: Sequence[Batches], ranks: int) -> None:
    """Check that every phase has two chunks per step, which a variance needs, unless nothing is to be reduced.

    Raises:
        InputError: a VR optimizer with k = ranks x accumulation = 1.
    """
    if not reduces_variance(config):
        return
    for each in batches:
        if ranks * each.accumulation_steps(ranks) < 2:
            raise InputError(
                f"{each.phase}{': ' if each.phase else ''}global_batch={each.global_batch} in one "
                f"micro_batch={each.micro_batch} on one rank is k = 1 chunk, which has no variance; lower micro_batch, "
                "use more ranks, or set gamma=1.0 in the optimizer's params"
            )


def _batch_sizes(batches: Batches, ranks: int) -> dict[str, tuple[str, int]]:
    """Return (the setting of the run file, value) by DeepSpeed's key."""
    return {
        "train_batch_size": ("global_batch", batches.global_batch),
        "train_micro_batch_size_per_gpu": ("micro_batch", batches.micro_batch),
        "gradient_accumulation_steps": (
            "global_batch / (micro_batch x ranks)",
            batches.accumulation_steps(ranks),
        ),
    }
