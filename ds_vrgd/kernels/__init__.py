"""Triton kernels for CUDA tensors: one pass over memory where eager PyTorch takes many.

A leaf: torch, and Triton where there is one, which is imported by the first kernel that runs. Each kernel's eager
twin, which also says what it computes, stands with the mathematics above this room.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether the kernels can work on these: contiguous fp32 tensors on one CUDA device, and Triton installed."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and _has_triton()
        and all(t.dtype == torch.float32 and t.device == device and t.is_contiguous() for t in tensors)
    )


__all__ = ["usable"]
