"""Make the optimizers' names known to DeepSpeed, and attach to every engine that uses one.

``import ds_vrgd`` is all that a program with a DeepSpeed JSON needs, so six methods of ``DeepSpeedEngine`` are wrapped:
each of the functions below that bear a method's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import logger

from ds_vrgd.engines.deepspeed.agreement import is_ours, require_same_model, require_same_optimizer
from ds_vrgd.engines.deepspeed.attach import attach
from ds_vrgd.engines.deepspeed.configs import unknown_keys
from ds_vrgd.engines.deepspeed.refusals import refuse_inexact, refuse_overruled, refuse_replaced
from ds_vrgd.engines.deepspeed.versions import check_class
from ds_vrgd.optim import OPTIMIZERS, VROptimizer, allocate_state_only
from ds_vrgd.optim.options import nearest

#: Spellings that a DeepSpeed JSON may use: the class names, and the paper's with a hyphen.
NAMES: dict[str, type[VROptimizer]] = OPTIMIZERS | {
    f"VR-{name.removeprefix('VR')}": cls for name, cls in OPTIMIZERS.items() if name.startswith("VR")
}

_WRAPPED = "_ds_vrgd_wrapped"


def register() -> None:
    """Wrap ``DeepSpeedEngine`` once; later calls do nothing.

    Raises:
        UnsupportedRelease: this DeepSpeed lacks a method that must be wrapped, or has changed one.
    """
    check_class(DeepSpeedEngine, deepspeed.__version__)
    for cls in OPTIMIZERS.values():
        if cls not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
            zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(cls)
    for wrapper in WRAPPERS:
        name = wrapper.__name__
        original = getattr(DeepSpeedEngine, name)
        if not hasattr(original, _WRAPPED):
            setattr(DeepSpeedEngine, name, _as_method(wrapper, original))


def _as_method(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(method, _WRAPPED, True)
    return method


def optimizer_name(original: Callable[..., Any], engine: Any) -> Any:
    """Return the name as the JSON spells it where it is ours; DeepSpeed turns "LAMB" into its own "lamb"."""
    spelled = (engine._config._param_dict.get("optimizer") or {}).get("type")
    return spelled if spelled in NAMES else original(engine)


def _is_supported_optimizer(original: Callable[..., Any], engine: Any, name: str) -> Any:
    known = name in NAMES or original(engine, name)
    if not known and (meant := nearest(name, OPTIMIZERS)) is not None:
        raise ValueError(
            f'optimizer.type="{name}" is neither an optimizer of DeepSpeed nor of ds_vrgd; did you mean "{meant}"?'
        )
    return known


def _configure_distributed_model(original: Callable[..., Any], engine: Any, model: Any, *args: Any) -> Any:
    """Compare the ranks' models before the first rank's weights are sent to all, which other shapes would garble."""
    if is_ours(engine, NAMES):
        require_same_model(engine, model)
    return original(engine, model, *args)


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, parameters: Any) -> Any:
    name = engine.optimizer_name()
    if str(name).lower() == LAMB_OPTIMIZER and engine.global_rank == 0:
        spelled = engine._config._param_dict["optimizer"]["type"]
        logger.warning(
            f'optimizer.type="{spelled}" is the LAMB of {"ds_vrgd" if name in NAMES else "DeepSpeed (FusedLamb)"}. '
            'The spelling decides: "LAMB" is that of ds_vrgd, "Lamb" and "lamb" are that of DeepSpeed.'
        )
    if name in NAMES:
        return NAMES[name](parameters, **(engine.optimizer_params() or {}))
    return original(engine, parameters)


def _do_optimizer_sanity_check(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """Check the configuration: the optimizer exists now, and no wrapper is built around it yet."""
    refuse_overruled(engine.optimizer_name(), NAMES, optimizer)
    if isinstance(optimizer, VROptimizer):
        for text in unknown_keys(engine._config._param_dict) if engine.global_rank == 0 else ():
            logger.warning(text)
        refuse_inexact(engine, optimizer)
        require_same_optimizer(engine, optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        refuse_replaced(optimizer)
    return original(engine, optimizer)


def _configure_optimizer(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    with allocate_state_only():
        original(engine, *args, **kwargs)
    attach(engine)


WRAPPERS: tuple[Callable[..., Any], ...] = (
    optimizer_name, _is_supported_optimizer, _configure_distributed_model, _configure_basic_optimizer,
    _do_optimizer_sanity_check, _configure_optimizer,
)  # fmt: skip
