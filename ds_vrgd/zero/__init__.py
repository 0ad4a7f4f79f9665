"""The only rooms that touch DeepSpeed."""

from ds_vrgd.zero.attach import attach
from ds_vrgd.zero.register import register

__all__ = ["attach", "register"]
