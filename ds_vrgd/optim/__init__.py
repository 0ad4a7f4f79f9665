"""The optimizers. They know shards, segments and moments, and have never heard of DeepSpeed."""

from ds_vrgd.optim.adam import VRAdam, VRAdamW
from ds_vrgd.optim.alive import unused_over
from ds_vrgd.optim.allocation import allocate_state_only
from ds_vrgd.optim.base import VROptimizer
from ds_vrgd.optim.lamb import LAMB, VRLAMB
from ds_vrgd.optim.lars import LARS, VRLARS
from ds_vrgd.optim.sgd import VRSGD, VRMomentum
from ds_vrgd.optim.shards import LayerStatistics

#: Every optimizer, by the name that a DeepSpeed JSON uses.
OPTIMIZERS: dict[str, type[VROptimizer]] = {
    cls.__name__: cls for cls in (VRSGD, VRMomentum, VRAdam, VRAdamW, VRLARS, VRLAMB, LARS, LAMB)
}

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "VRLAMB",
    "VRLARS",
    "VRSGD",
    "LayerStatistics",
    "VRAdam",
    "VRAdamW",
    "VRMomentum",
    "VROptimizer",
    "allocate_state_only",
    "unused_over",
]
