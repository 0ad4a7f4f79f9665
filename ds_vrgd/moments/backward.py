"""The backward passes of a window: what they bring, where they end, and those that broke off."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ds_vrgd.moments.hooks import weakly


class BackwardPasses:
    """Follows the backward passes that bring gradients, each from its first gradient to its end.

    Autograd calls back at the end of a pass, and drops its callbacks where the pass breaks off. A reentrant checkpoint
    runs a pass inside another one; both are one pass here, which ends with the outermost.

    Args:
        end: a bound method, called at the end of each pass; its object is not kept alive.

    Attributes:
        came: what the pass that runs has brought so far.
        left: what passes that broke off have brought.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = weakly(end)
        self.clear()

    def clear(self) -> None:
        """Forget all passes: their gradients are used or thrown away."""
        self.came: set[Any] = set()
        self.left: set[Any] = set()
        self._callback: Callable[[], Any] | None = None
        self._expects_end = False

    @property
    def _is_running(self) -> bool:
        return self._callback is not None and self._callback() is not None  # autograd alone keeps it alive

    @property
    def broke_off(self) -> bool:
        """Return whether the last pass broke off."""
        return self._expects_end and not self._is_running

    @property
    def begins(self) -> bool:
        """Return whether what comes now is the first of a pass."""
        return not self._is_running and (self._expects_end or not self.came)

    @property
    def unfinished(self) -> set[Any]:
        """Return what came in passes that have not ended."""
        return self.left | self.came

    def take(self, what: Any) -> bool:
        """Count what the pass that runs has brought; return whether it has brought it for the first time."""
        if self.begins:
            self.left |= self.came
            self.came = set()
        self._expect_end()
        is_new = what not in self.came
        self.came.add(what)
        return is_new

    def forget(self, what: Any) -> None:
        """Forget that something came."""
        self.came.discard(what)
        self.left.discard(what)

    def _expect_end(self) -> None:
        if not self._is_running:
            callback = functools.partial(self._end_pass)
            self._callback, self._expects_end = weakref.ref(callback), True
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end_pass(self) -> None:
        self._callback, self._expects_end = None, False
        if (outer := torch._C._current_autograd_node()) is None:
            self._end()
            self.came = set()
            return
        # The pass ran inside this node. The outer pass continues at the nodes that take this node's gradient.
        for node, _ in outer.next_functions:
            if node is not None:
                node.register_prehook(lambda grads: self._expect_end())
