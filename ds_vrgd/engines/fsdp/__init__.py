"""PyTorch's FSDP2 (``fully_shard``): chunks are what each rank would hand to a reduce-scatter."""

from ds_vrgd.engines.fsdp.observer import attach
from ds_vrgd.engines.fsdp.universal import load_universal

__all__ = ["attach", "load_universal"]
