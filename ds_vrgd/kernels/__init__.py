"""Update kernels: one pass over memory where eager PyTorch takes many.

A leaf: torch, and Triton where there is one, which is imported by the first kernel that runs on CUDA. Each kernel's
eager twin, which also says what it computes, stands with the mathematics above this room.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can work on these: contiguous fp32 on one CUDA device, and Triton installed."""
    return tensors[0].device.type == "cuda" and _has_triton() and _alike(*tensors)


def serving(*tensors: Tensor) -> ModuleType | None:
    """The kernels that can work on these: Triton's on CUDA, those of the CPU there, else None.

    Both modules have the same names.
    """
    if usable(*tensors):
        from ds_vrgd.kernels import on_cuda

        return on_cuda
    if tensors[0].device.type == "cpu" and _alike(*tensors):
        from ds_vrgd.kernels import on_cpu

        return on_cpu
    return None


def _alike(*tensors: Tensor) -> bool:
    device = tensors[0].device
    return all(t.dtype == torch.float32 and t.device == device and t.is_contiguous() for t in tensors)


__all__ = ["serving", "usable"]
