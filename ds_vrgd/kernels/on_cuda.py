"""The update kernels of CUDA tensors, in Triton. :mod:`ds_vrgd.kernels.on_cpu` has the same names."""

from ds_vrgd.kernels.adam import adam_step
from ds_vrgd.kernels.lamb import lamb_advance, lamb_apply
from ds_vrgd.kernels.momentum import lars_norms, momentum_step
from ds_vrgd.kernels.ratio import ratio_sums
from ds_vrgd.kernels.shared import empty_partials, sum_blocks

__all__ = [
    "adam_step",
    "empty_partials",
    "lamb_advance",
    "lamb_apply",
    "lars_norms",
    "momentum_step",
    "ratio_sums",
    "sum_blocks",
]
