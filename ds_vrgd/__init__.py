"""Variance-reduced large-batch optimizers for PyTorch and DeepSpeed; exact LARS and LAMB under ZeRO.

Where DeepSpeed is installed, ``import ds_vrgd`` makes every optimizer known to it: ``{"optimizer": {"type": "VRLAMB",
...}}`` in its JSON is enough. Plain PyTorch needs torch alone.
"""

from typing import TYPE_CHECKING

from ds_vrgd import moved as _moved
from ds_vrgd.engines import attach
from ds_vrgd.engines import register as _register
from ds_vrgd.noise import (
    GSNRStatistics,
    LayerGSNR,
    NoiseScale,
    NoiseScaleEstimate,
    NoiseScaleMeter,
    NoiseScaleUnknown,
    clamped_by_noise,
    gsnr_stats,
    noise_scale,
    rank_report,
)
from ds_vrgd.optim import (
    LAMB,
    LARS,
    VRLAMB,
    VRLARS,
    VRSGD,
    RankError,
    RankEvent,
    RankReport,
    RankWatch,
    VRAdam,
    VRAdamW,
    VRMomentum,
)

__version__ = "0.1.0"

_moved.install()
_register()
if not TYPE_CHECKING:  # a type checker must still see a misspelt name
    __getattr__ = _moved.attribute

__all__ = [
    "LAMB",
    "LARS",
    "VRLAMB",
    "VRLARS",
    "VRSGD",
    "GSNRStatistics",
    "LayerGSNR",
    "NoiseScale",
    "NoiseScaleEstimate",
    "NoiseScaleMeter",
    "NoiseScaleUnknown",
    "RankError",
    "RankEvent",
    "RankReport",
    "RankWatch",
    "VRAdam",
    "VRAdamW",
    "VRMomentum",
    "__version__",
    "attach",
    "clamped_by_noise",
    "gsnr_stats",
    "noise_scale",
    "rank_report",
]
