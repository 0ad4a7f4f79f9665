"""The only rooms that touch DeepSpeed."""

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
