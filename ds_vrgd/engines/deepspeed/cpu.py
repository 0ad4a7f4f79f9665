"""DeepSpeed on CPUs: what it compiles and refuses there without need."""

from __future__ import annotations

import deepspeed.ops
from deepspeed.accelerator import get_accelerator


def leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed on the CPU from compiling its shared-memory operation.

    Call it before ``deepspeed.initialize`` or ``deepspeed.init_distributed``. Compiling takes a minute and a compiler,
    and every start leaves 66 MB of shared memory behind for each rank. Only ``inference_all_reduce`` uses the
    operation. ``import ds_vrgd`` does not leave it out by itself: a program may use it.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def compute_fp16_on_cpu() -> None:
    """Let DeepSpeed train in fp16 on CPUs without instructions for it, where PyTorch computes it all the same, slowly.

    Does nothing on other devices.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        type(accelerator).is_fp16_supported = lambda self: True
