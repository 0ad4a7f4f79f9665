"""The only rooms that touch DeepSpeed."""

from ds_vrgd.zero.engines import leave_out_shared_memory_op, set_batch_sizes
from ds_vrgd.zero.register import register

__all__ = ["leave_out_shared_memory_op", "register", "set_batch_sizes"]
