"""What every rank imports: here once, in the server that ranks are forked from, and not for seconds in each of them.

Nothing but imports: a process that has threads, a thread pool or a process group must not be forked.
"""

import gc

import deepspeed.runtime.bf16_optimizer
import deepspeed.runtime.zero.muon.muon_optimizer  # a ZeRO engine imports it, and with it torch's compiler
import torch

import ds_vrgd.zero

__all__ = ["deepspeed", "ds_vrgd", "torch"]

# DeepSpeed collects garbage whenever it makes a ZeRO-3 engine; what is imported never is any.
gc.freeze()
