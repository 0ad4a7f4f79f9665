"""The DeepSpeed adapter: the only package that touches DeepSpeed."""
# ruff: noqa: E402

import deepspeed
import torch

from ds_vrgd.engines.deepspeed.versions import check_versions

# Before a module asks an unsupported release for a name that it does not have.
check_versions(deepspeed.__version__, torch.__version__)

from ds_vrgd.engines.deepspeed.checkpoints.restore import guard_loading
from ds_vrgd.engines.deepspeed.checkpoints.safe_load import CheckpointError, read_plain, run_nothing
from ds_vrgd.engines.deepspeed.checkpoints.universal import to_universal
from ds_vrgd.engines.deepspeed.cpu import compute_fp16_on_cpu, leave_out_shared_memory_op
from ds_vrgd.engines.deepspeed.register import register

__all__ = [
    "CheckpointError",
    "compute_fp16_on_cpu",
    "guard_loading",
    "leave_out_shared_memory_op",
    "read_plain",
    "register",
    "run_nothing",
    "to_universal",
]
