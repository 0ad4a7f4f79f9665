"""Make the optimizers' names known to DeepSpeed, and have every engine attach itself.

``import ds_vrgd`` is all that a program with a DeepSpeed JSON needs, so six methods of ``DeepSpeedEngine`` are
wrapped: what the JSON's name is, whether it is supported, how the model is spread over the ranks, how the optimizer is
built, whether the configuration suits it, and what happens when the engine has built its wrapper around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import utils as zero_utils

from ds_vrgd.optim import OPTIMIZERS, VROptimizer, allocate_state_only
from ds_vrgd.zero.attach import attach
from ds_vrgd.zero.ranks import is_ours, require_same_model, require_same_optimizer
from ds_vrgd.zero.refusals import refuse_inexact, refuse_replaced
from ds_vrgd.zero.versions import DEEPSPEED

#: Spellings that a DeepSpeed JSON may use: the class names, and the paper's with a hyphen.
NAMES: dict[str, type[VROptimizer]] = OPTIMIZERS | {
    f"VR-{name.removeprefix('VR')}": cls for name, cls in OPTIMIZERS.items() if name.startswith("VR")
}

_WRAPPED = "_ds_vrgd_wrapped"


def register() -> None:
    """Wrap ``DeepSpeedEngine`` once; later calls do nothing.

    Raises:
        RuntimeError: this DeepSpeed lacks a method that must be wrapped.
    """
    for cls in OPTIMIZERS.values():
        if cls not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
            zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(cls)
    for name, wrapper in (
        ("optimizer_name", _optimizer_name),
        ("_is_supported_optimizer", _is_supported_optimizer),
        ("_configure_distributed_model", _configure_distributed_model),
        ("_configure_basic_optimizer", _configure_basic_optimizer),
        ("_do_optimizer_sanity_check", _do_optimizer_sanity_check),
        ("_configure_optimizer", _configure_optimizer),
    ):
        original = getattr(DeepSpeedEngine, name, None)
        if original is None:
            raise RuntimeError(f"this DeepSpeed has no DeepSpeedEngine.{name}; ds_vrgd needs deepspeed{DEEPSPEED}")
        if not hasattr(original, _WRAPPED):
            setattr(DeepSpeedEngine, name, _as_method(wrapper, original))


def _as_method(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(method, _WRAPPED, True)
    return method


def _optimizer_name(original: Callable[..., Any], engine: Any) -> Any:
    """The name as the JSON spells it where it is ours; DeepSpeed turns "LAMB" into its own "lamb"."""
    spelled = (engine._config._param_dict.get("optimizer") or {}).get("type")
    return spelled if spelled in NAMES else original(engine)


def _is_supported_optimizer(original: Callable[..., Any], engine: Any, name: str) -> Any:
    return name in NAMES or original(engine, name)


def _configure_distributed_model(original: Callable[..., Any], engine: Any, model: Any, *args: Any) -> Any:
    """The last moment before the first rank's weights are sent to all: other shapes there would hang or be garbled."""
    if is_ours(engine, NAMES):
        require_same_model(engine, model)
    return original(engine, model, *args)


def _configure_basic_optimizer(original: Callable[..., Any], engine: Any, parameters: Any) -> Any:
    name = engine.optimizer_name()
    if name not in NAMES:
        return original(engine, parameters)
    arguments = dict(engine.optimizer_params() or {})
    return NAMES[name](parameters, **arguments)


def _do_optimizer_sanity_check(original: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """The first moment at which the optimizer exists, and the last before a wrapper is built around it."""
    if isinstance(optimizer, VROptimizer):
        refuse_inexact(engine, type(optimizer).__name__)
        require_same_optimizer(engine, optimizer)
    elif isinstance(optimizer, torch.optim.Optimizer):
        refuse_replaced(optimizer)
    return original(engine, optimizer)


def _configure_optimizer(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    with allocate_state_only():
        original(engine, *args, **kwargs)
    attach(engine)
