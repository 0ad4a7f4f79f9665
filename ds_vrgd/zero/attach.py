"""Connect one of our optimizers with the engine that was built around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.utils import logger

from ds_vrgd.optim import VROptimizer
from ds_vrgd.zero.observer import EngineObserver
from ds_vrgd.zero.refusals import guard_compile
from ds_vrgd.zero.wrappers import holdings_of

Engine = Any


def attach(engine: Engine) -> None:
    """Let the engine's client optimizer observe the engine; does nothing for an optimizer that is not ours.

    Called when the engine has configured its optimizer.

    Raises:
        RuntimeError: the optimizer wrapper is none that is known.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, VROptimizer):
        return
    holdings = holdings_of(engine)
    observer = EngineObserver(engine, holdings)
    optimizer.observe(observer)
    guard_compile(engine)
    _call_after(engine, "_backward_epilogue", observer.end_micro_batch)
    _call_after(engine, "_take_model_step", observer.end_window)
    if engine.global_rank == 0:
        layers = sum(len(layout.layers) for layout in holdings.layouts.values())
        observed = len(holdings.routes) + len(holdings.copies)
        logger.info(
            f"{type(optimizer).__name__}: {layers} layers under {type(engine.optimizer).__name__}, "
            f"variance reduction on {observed} of them"
        )


def _call_after(engine: Engine, name: str, then: Callable[[], None]) -> None:
    """Have ``then`` called after every successful call of one of this engine's methods."""
    method = getattr(engine, name)

    @functools.wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(engine, name, followed)
