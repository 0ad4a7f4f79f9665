"""Optimizers of ds_vrgd inside Megatron-Core's: the public names; importing this module imports Megatron-Core."""

from ds_vrgd.engines.megatron import get_optimizer

__all__ = ["get_optimizer"]
