"""Variance-reduced large-batch optimizers for PyTorch and DeepSpeed; exact LARS and LAMB under ZeRO.

``import ds_vrgd`` makes every optimizer known to DeepSpeed: ``{"optimizer": {"type": "VRLAMB", ...}}`` in its JSON
is enough.
"""

from ds_vrgd.meter import NoiseScale, NoiseScaleEstimate, NoiseScaleMeter
from ds_vrgd.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VRAdam, VRAdamW, VRMomentum
from ds_vrgd.statistics import GSNRStatistics, LayerGSNR, gsnr_stats, noise_scale
from ds_vrgd.zero import register as _register

__version__ = "0.1.0"

_register()

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
    "VRAdam",
    "VRAdamW",
    "VRMomentum",
    "__version__",
    "gsnr_stats",
    "noise_scale",
]
