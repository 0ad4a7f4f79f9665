"""The engine adapters: each gives the optimizers chunks, layouts and windows."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from ds_vrgd.optim import OPTIMIZERS


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer see the chunks of a model that ``fully_shard`` has sharded.

    A chunk is what one rank would hand to FSDP2's reduce-scatter: the gradient of one micro-batch, or the sum of
    several under ``set_requires_gradient_sync(False)``. The exchange takes the reduction's place, and ``.grad`` is the
    exact mean in fp32 before FSDP2 casts it to the parameters' dtype; this is of use to LAMB and LARS, too.

    Call it once, after ``fully_shard`` and before the first backward pass, and again after a new optimizer was made.

    Args:
        model: the root module, perhaps inside other wrappers.
        optimizer: an optimizer of this package over the model's sharded parameters, perhaps inside a wrapper.

    Raises:
        TypeError: the optimizer is another.
        ValueError: the model is not sharded by FSDP2, or in a way in which GSNR would not be exact.
        RuntimeError: PyTorch is older than 2.9.
    """
    from ds_vrgd.engines import fsdp

    fsdp.attach(model, optimizer)


def register() -> None:
    """Make the optimizers known to every engine that is installed.

    A DeepSpeed that ds_vrgd does not support leaves plain PyTorch usable: its engines then refuse these optimizers. So
    does one that is too new: a name that the adapter imports may be gone.
    """
    try:
        import deepspeed
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            return  # not installed
        warnings.warn(
            f"DeepSpeed is installed, but importing it failed with {type(error).__name__}: {error}. ds_vrgd works in "
            "plain PyTorch alone. Repair or uninstall DeepSpeed.",
            stacklevel=3,
        )
        return
    try:
        from ds_vrgd.engines.deepspeed import register as register_with_deepspeed

        register_with_deepspeed()
    except Exception as error:
        reason = str(error)
        if not isinstance(error, RuntimeError):
            release = f"DeepSpeed {getattr(deepspeed, '__version__', 'without a version')}"
            reason = f"ds_vrgd does not work with {release}: {type(error).__name__}: {error}. Install another release"
        if hasattr(deepspeed, "DeepSpeedEngine"):
            _refuse(deepspeed.DeepSpeedEngine, reason)


def _refuse(engine_class: Any, reason: str) -> None:
    """Have every engine of a class raise ``reason`` when it is given an optimizer of ds_vrgd."""
    build = engine_class.__init__

    @functools.wraps(build)
    def refuse_or_build(engine: Any, *args: Any, **kwargs: Any) -> None:
        if any(map(_names_ours, (*args, *kwargs.values()))):
            raise RuntimeError(reason)
        build(engine, *args, **kwargs)

    engine_class.__init__ = refuse_or_build


def _names_ours(argument: Any) -> bool:
    """Return whether an argument is, makes, or names in a configuration, an optimizer of ds_vrgd."""
    made = getattr(argument, "func", argument)
    if issubclass(made if isinstance(made, type) else type(made), tuple(OPTIMIZERS.values())):
        return True
    config = argument if isinstance(argument, dict) else getattr(argument, "_param_dict", None)
    chosen = config.get("optimizer") if isinstance(config, dict) else None
    return isinstance(chosen, dict) and str(chosen.get("type")).replace("-", "") in OPTIMIZERS
