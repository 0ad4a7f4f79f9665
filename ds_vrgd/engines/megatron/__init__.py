"""Megatron-Core: chunks are what each data-parallel rank has accumulated when its buckets are reduced."""

from ds_vrgd.extras import need

need("megatron", "megatron")

from ds_vrgd.engines.megatron.optimizer import get_optimizer  # noqa: E402

__all__ = ["get_optimizer"]
