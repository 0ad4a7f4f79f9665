"""What lies between the command line and the first update: DeepSpeed's configuration, batch sizes, CPU specifics."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_vrgd.training.errors import InputError
from ds_vrgd.zero import leave_out_shared_memory_op
from ds_vrgd.zero.configs import read_config


@dataclass(frozen=True)
class Batches:
    """Batch sizes of a run, or of one of its phases, in examples.

    Attributes:
        global_batch: of one update.
        micro_batch: of one backward pass on one rank, a chunk.
        phase: where the run file has these sizes, for messages: "phase 2"; empty where it has no phases.
    """

    global_batch: int
    micro_batch: int
    phase: str = ""

    def accumulation_steps(self, ranks: int) -> int:
        """Micro-batches per rank and update.

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
    """On CPU only: one thread per core over all ranks, and no shared-memory op in DeepSpeed."""
    if get_accelerator().device_name() != "cpu":
        return
    leave_out_shared_memory_op()
    if "OMP_NUM_THREADS" not in os.environ:
        # Set by torchrun and ds_vrgd.zero.launchers, or by DeepSpeed's launcher.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))


def load_deepspeed_config(path: Path) -> dict[str, Any]:
    """Read DeepSpeed's JSON and check what this run needs of it.

    Raises:
        InputError: not readable, not JSON, without an optimizer, or with a schedule of its own.
    """
    try:
        config = read_config(path)
    except ValueError as error:
        raise InputError(str(error)) from error
    if "type" not in config.get("optimizer", {}):
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
    config: dict[str, Any], batches: Sequence[Batches], index: int, ranks: int, output: Path
) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``: batch sizes ``batches[index]``, monitors, "auto" values.

    ``bf16.enabled`` = "auto" means: on an accelerator yes, on CPU no (where few processors are fast in bf16).

    Args:
        batches: of every phase of the run; all are checked, before the first one costs hours.

    Raises:
        InputError: a batch size in the JSON contradicts the run file, the batch cannot be shared out evenly, or a VR
            optimizer would see a single chunk.
    """
    config = copy.deepcopy(config)
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
    """Whether the optimizer of a DeepSpeed JSON that :func:`load_deepspeed_config` has read measures GSNR."""
    optimizer = config["optimizer"]
    return bool(optimizer["type"].startswith("VR") and optimizer.get("params", {}).get("gamma", 0.0) != 1.0)


def _check_chunks(config: dict[str, Any], batches: Sequence[Batches], ranks: int) -> None:
    """Check that every phase has the two chunks a step that a variance needs, unless nothing is to be reduced.

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
    """DeepSpeed's key -> (what sets it in the run file, value)."""
    return {
        "train_batch_size": ("global_batch", batches.global_batch),
        "train_micro_batch_size_per_gpu": ("micro_batch", batches.micro_batch),
        "gradient_accumulation_steps": (
            "global_batch / (micro_batch x ranks)",
            batches.accumulation_steps(ranks),
        ),
    }
