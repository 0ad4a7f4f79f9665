"""The only rooms that touch DeepSpeed."""
# ruff: noqa: E402

import deepspeed
import torch

from ds_vrgd.zero.versions import check_versions

# Before anything asks an unsupported release for a name that it does not have.
check_versions(deepspeed.__version__, torch.__version__)

from ds_vrgd.zero.engines import compute_fp16_on_cpu, leave_out_shared_memory_op, set_batch_sizes, trim_csv_monitor
from ds_vrgd.zero.register import register
from ds_vrgd.zero.saved import CheckpointError
from ds_vrgd.zero.saving import Written, save_checkpoint
from ds_vrgd.zero.universal import to_universal

__all__ = [
    "CheckpointError",
    "Written",
    "compute_fp16_on_cpu",
    "leave_out_shared_memory_op",
    "register",
    "save_checkpoint",
    "set_batch_sizes",
    "to_universal",
    "trim_csv_monitor",
]
