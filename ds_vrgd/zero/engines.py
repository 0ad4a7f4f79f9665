"""What a training program needs of DeepSpeed beyond its documented interface."""

from __future__ import annotations

from typing import Any

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator

Engine = Any


def leave_out_shared_memory_op() -> None:
    """Keep ``deepspeed.init_distributed`` on CPU from compiling its shared-memory op; call it before.

    Compiling takes a minute and a compiler, every launch of the op leaks 66 MB of shared memory a rank, and only
    inference uses it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def compute_fp16_on_cpu() -> None:
    """Have DeepSpeed train in fp16 on CPUs without instructions for it, where PyTorch computes it all the same, slowly.

    Does nothing on other devices.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        type(accelerator).is_fp16_supported = lambda self: True


def set_batch_sizes(engine: Engine, micro_batch: int, global_batch: int) -> None:
    """Give a running engine other batch sizes, at every ZeRO stage; call it between two steps.

    The engine's own counter of micro-batches runs on and may be out of step with the new accumulation: set the
    boundary with ``engine.set_gradient_accumulation_boundary`` from then on.

    Args:
        engine: a DeepSpeed engine.
        micro_batch: samples of one backward pass on one rank.
        global_batch: samples of one step, a multiple of ``micro_batch`` times the data-parallel ranks.
    """
    engine.set_train_micro_batch_size(micro_batch)
    engine.set_train_batch_size(global_batch)
    # ZeRO's wrappers keep a copy, which the engine's setters leave behind and CPU offload reads.
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = engine.gradient_accumulation_steps()
