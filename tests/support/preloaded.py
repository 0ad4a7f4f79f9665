"""What every rank imports: here once, in the server that ranks are forked from, and not for seconds in each of them.

Imports and no more: a process that has threads, a thread pool or a process group must not be forked.
"""

import gc

import deepspeed.runtime.bf16_optimizer
import torch

import ds_vrgd.doctor.ranks
import ds_vrgd.engines.deepspeed

__all__ = ["deepspeed", "ds_vrgd", "torch"]

# Compiles nothing, but imports the compiler, as each ZeRO engine of DeepSpeed does.
torch.compile(len)

# DeepSpeed collects garbage whenever it makes a ZeRO-3 engine; what is imported never is any.
gc.freeze()
