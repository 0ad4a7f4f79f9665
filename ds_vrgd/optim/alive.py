"""Which optimizers have been made, so that one that was silently put aside for another can be found."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from ds_vrgd.optim.plain import PlainObserver

if TYPE_CHECKING:
    from ds_vrgd.optim.base import VROptimizer

_made: weakref.WeakSet[VROptimizer] = weakref.WeakSet()


def remember(optimizer: VROptimizer) -> None:
    """Keep in mind, without keeping alive."""
    _made.add(optimizer)


def unused_over(params: Iterable[Tensor]) -> VROptimizer | None:
    """An optimizer of ours that holds any of ``params``, is in no engine, and has neither stepped nor zeroed."""
    wanted = set(params)
    for optimizer in _made:
        idle = isinstance(optimizer.observer, PlainObserver) and optimizer.observer.window == 0
        if idle and any(not wanted.isdisjoint(group["params"]) for group in optimizer.param_groups):
            return optimizer
    return None
