"""Gradients that a program has set to zero in place, which no hook can see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments.streams import on_host


def zeros_among(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters whose ``.grad`` is zero everywhere; waits once for each device and dtype."""
    found = [(held, torch.stack(_largest(held)).tolist()) for held in _alike(params)]
    return [param for held, norms in found for param, norm in zip(held, norms, strict=True) if norm == 0.0]


def _alike(params: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the parameters that have a gradient, by its device and dtype."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in params:
        if param.grad is not None and param.numel():
            alike.setdefault((param.grad.device, param.grad.dtype), []).append(param)
    return alike.values()


def _largest(params: Iterable[Any]) -> list[Tensor]:
    """Return the largest magnitude in each ``.grad``, on its device."""
    grads = [param.grad for param in params]
    return list(torch._foreach_norm(grads, float("inf"))) if grads else []


class Discards:
    """Finds gradients that were thrown away in place between two backward passes.

    ``module.zero_grad(set_to_none=False)`` and ``p.grad.data.zero_()`` leave a ``.grad`` of zeros in place of one that
    was not zero; zeros that autograd itself left do not count. A ``.grad`` that is gone was thrown away whatever it
    was. One pass over the gradients after each backward pass, and one before the next, whose result is best asked for
    at the end of that: then nobody waits for it.
    """

    def __init__(self) -> None:
        self._left: list[tuple[list[Tensor], Tensor]] = []
        self._looked: list[tuple[list[Tensor], Callable[[], Sequence[Tensor]]]] = []
        self._absent: set[Tensor] = set()

    def record(self, params: Iterable[Tensor]) -> None:
        """Remember which parameters' ``.grad`` holds anything after a backward pass."""
        self._left = [(held, torch.stack(_largest(held))) for held in _alike(params)]  # on their devices

    def look(self) -> None:
        """Compare the gradients with what the last backward pass has left; nothing waits."""
        self._absent = {param for params, _ in self._left for param in params if param.grad is None}
        for params, before in self._left:
            held, zero = [param for param in params if param.grad is not None], before.new_zeros(())
            norms = dict(zip(held, _largest(held), strict=True))
            after = torch.stack([norms.get(param, zero) for param in params])
            self._looked.append((params, on_host([(before != 0) & (after == 0)])))

    def found(self) -> list[Tensor]:
        """Return the parameters whose gradient was there after a backward pass, and gone at the look that followed."""
        looked, self._looked = self._looked, []
        flags = [(params, wait()[0].tolist()) for params, wait in looked]
        pairs = [pair for params, gone in flags for pair in zip(params, gone, strict=True)]
        return [param for param, is_gone in pairs if is_gone or param in self._absent]

    def are_all(self, discarded: Iterable[Tensor]) -> bool:
        """Return whether the last backward pass left nothing except for what was discarded.

        Zeros that are in ``.grad`` still may have been thrown away with all others in place, and were not where others
        are gone.
        """
        gone = set(discarded)
        left = [pair for params, norms in self._left for pair in zip(params, norms.tolist(), strict=True)]
        return all(param in gone or not (norm or self._absent) for param, norm in left)

    def clear(self) -> None:
        """Begin the next window."""
        self._left, self._looked, self._absent = [], [], set()
