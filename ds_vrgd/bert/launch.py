"""What lies between the command line and the first update: DeepSpeed's configuration, ranks, CPU specifics."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from ds_vrgd.bert.errors import InputError, PreparationFailed, TrainingFailed
from ds_vrgd.bert.runfile import Phase, RunFile
from ds_vrgd.zero import leave_out_shared_memory_op
from ds_vrgd.zero.configs import read_config

_PREPARATION_TIMEOUT = timedelta(days=2)  # a large corpus takes hours to tokenise

T = TypeVar("T")


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
            f"--deepspeed_config {path} has a scheduler, and the run file's phases set the learning rate; remove "
            '"scheduler" from the JSON'
        )
    return config


def fill_deepspeed_config(
    config: dict[str, Any], run: RunFile, phase: Phase, ranks: int, output: Path
) -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``: batch sizes of ``phase``, monitors, "auto" values.

    ``bf16.enabled`` = "auto" means: on an accelerator yes, on CPU no (where few processors are fast in bf16).

    Raises:
        InputError: a batch size in the JSON contradicts the run file, the batch cannot be shared out evenly, or a VR
            optimizer would see a single chunk.
    """
    config = copy.deepcopy(config)
    _check_chunks(config, run, ranks)
    for number, each in enumerate(run.phases, start=1):
        for key, (setting, value) in _batch_sizes(each, ranks).items():
            given = config.get(key, "auto")
            if given not in ("auto", value):
                raise InputError(
                    f"{key}={given} in the DeepSpeed JSON contradicts {setting}={value} in phase {number} of the run "
                    f'file; remove {key} from the JSON or set it to "auto"'
                )
    config.update({key: value for key, (_, value) in _batch_sizes(phase, ranks).items()})
    for monitor, folder in (("tensorboard", "tensorboard"), ("csv_monitor", "csv")):
        config.setdefault(monitor, {"enabled": True, "output_path": str(output), "job_name": folder})
    if config.get("bf16", {}).get("enabled") == "auto":
        config["bf16"]["enabled"] = get_accelerator().device_name() != "cpu"
    return config


def reduces_variance(config: dict[str, Any]) -> bool:
    """Whether the optimizer of a DeepSpeed JSON that :func:`load_deepspeed_config` has read measures GSNR."""
    optimizer = config["optimizer"]
    return bool(optimizer["type"].startswith("VR") and optimizer.get("params", {}).get("gamma", 0.0) != 1.0)


def _check_chunks(config: dict[str, Any], run: RunFile, ranks: int) -> None:
    """Check that every phase has the two chunks a step that a variance needs, unless nothing is to be reduced.

    Raises:
        InputError: a VR optimizer with k = ranks x accumulation = 1.
    """
    if not reduces_variance(config):
        return
    for number, phase in enumerate(run.phases, start=1):
        if ranks * phase.accumulation_steps(ranks) < 2:
            raise InputError(
                f"phase {number}: global_batch={phase.global_batch} in one micro_batch={phase.micro_batch} on one rank "
                "is k = 1 chunk, which has no variance; lower micro_batch, use more ranks, or set gamma=1.0 in the "
                "optimizer's params"
            )


def _batch_sizes(phase: Phase, ranks: int) -> dict[str, tuple[str, int]]:
    """DeepSpeed's key -> (what sets it in the run file, value)."""
    return {
        "train_batch_size": ("global_batch", phase.global_batch),
        "train_micro_batch_size_per_gpu": ("micro_batch", phase.micro_batch),
        "gradient_accumulation_steps": (
            "global_batch / (micro_batch x ranks)",
            phase.accumulation_steps(ranks),
        ),
    }


class Ranks:
    """What the ranks say to each other outside of training: one works while the others wait, or all compare notes.

    Attributes:
        rank: of this process.
        size: how many there are.
    """

    def __init__(self) -> None:
        # A group of its own: waiting for hours must not need an hours-long timeout in training's collectives.
        self._group = torch.distributed.new_group(backend="gloo", timeout=_PREPARATION_TIMEOUT)
        self.rank = torch.distributed.get_rank()
        self.size = torch.distributed.get_world_size()

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Result of ``work`` on every rank. Collective.

        Raises:
            InputError, PreparationFailed, TrainingFailed: raised by ``work``, on every rank.
        """
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except (InputError, PreparationFailed, TrainingFailed) as error:
                outcome[1] = error
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, on every rank, by rank. Collective."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values
