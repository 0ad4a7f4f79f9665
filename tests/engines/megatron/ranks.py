"""Ranks that have Megatron-Core."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.support.ranks import DEVICE, run_on_ranks


def on_ranks(world: int, function: str, *arguments: Any) -> list[Any]:
    """Run a function of a module beside this one, given as ``module.function``; without CUDA, the CPU answers for it.

    Without megatron-core, which ``make venv`` installs, that is an error and not a skipped test.
    """
    return run_on_ranks(world, _call, function, arguments)


def _call(rank: int, function: str, arguments: tuple[Any, ...]) -> Any:
    if DEVICE == "cpu":
        from tests.engines.megatron.without_cuda import pretend

        pretend()
    module, _, name = function.partition(".")
    called: Callable[..., Any] = getattr(importlib.import_module(f"tests.engines.megatron.{module}"), name)
    return called(rank, *arguments)
