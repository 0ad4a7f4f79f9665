"""Triton kernels for CUDA: one pass over memory where eager PyTorch makes many.

Triton, where it is installed, is imported by the first kernel that runs on CUDA. What the kernels compute stands as
torch code in ``ds_vrgd.gsnr`` and, one rule a file, in ``ds_vrgd.optim``; that code also runs everywhere else.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from operator import attrgetter

import torch
from torch import Tensor

_KIND = attrgetter("device", "dtype")


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: Tensor) -> bool:
    """Return whether the kernels can work on these: contiguous fp32 on one CUDA device, and Triton is installed."""
    device = tensors[0].device
    return (
        device.type == "cuda"
        and _has_triton()
        and set(map(_KIND, tensors)) == {(device, torch.float32)}
        and all(map(Tensor.is_contiguous, tensors))
    )
