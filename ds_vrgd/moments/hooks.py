"""Gradients of a parameter where they leave autograd: after every tensor hook, and before they are accumulated."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def value_of(grad: Tensor) -> Tensor:
    """Return a gradient outside the graph: itself, where it is in none, as autograd hands it out.

    Nothing else keeps autograd from making a parameter's ``.grad`` of the same memory, which others change.
    """
    return grad.detach() if grad.requires_grad else grad


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method as a hook that does not keep its object alive, and does nothing without it."""
    of_object = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        return None if (bound := of_object()) is None else bound(*args, **kwargs)

    return call


class GradientHook:
    """Hands an observer each gradient that autograd is about to accumulate in a parameter's ``.grad``.

    A tensor hook sees a gradient before the tensor hooks that were registered later. So the one registered here only
    arms a pre-hook of the parameter's ``AccumulateGrad`` node, which autograd calls after all tensor hooks, whatever
    their order. ``torch.autograd.grad()`` accumulates nothing, and does not call it.

    Neither the observer nor the parameter is kept alive.

    Args:
        param: a leaf that requires a gradient.
        take: a bound method of the observer, called with the parameter and the gradient.

    Raises:
        RuntimeError: in a backward pass under compiled autograd, which has no such node.
    """

    def __init__(self, param: Tensor, take: Callable[[Tensor, Tensor], None]) -> None:
        self._param = weakref.ref(param)
        self._take = weakly(take)
        self._handle = param.register_hook(self._arm)

    def _arm(self, grad: Tensor) -> None:
        # The node is made anew with a graph, unless somebody (DDP, for one) keeps it.
        node: Any = torch._C._current_autograd_node()
        if node is None:  # nodes are what compiled autograd compiles away, and prehooks with them
            raise RuntimeError(
                "compiled autograd runs this backward pass, in which the chunks of a gradient cannot be seen. Leave it "
                "off (torch._dynamo.config.compiled_autograd=False, and no torch._dynamo.compiled_autograd around "
                "backward()), or set gamma=1.0, which needs no chunks"
            )
        if self not in node.metadata:
            node.metadata[self] = True
            node.register_prehook(self._see)

    def _see(self, grads: tuple[Any, ...]) -> None:
        if (param := self._param()) is not None and grads[0] is not None:
            self._take(param, grads[0])

    def remove(self) -> None:
        """Show no more gradients, not even of a backward pass that is under way."""
        self._handle.remove()
        self._take = lambda param, grad: None
