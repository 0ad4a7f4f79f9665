"""The base of the adapters whose gradient of a step is what ``step()`` finds in ``.grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE, ChunkNorms, Moments, Ranks, ShardLayout, local_gradient
from ds_vrgd.optim import checks, world
from ds_vrgd.optim.observer import BadGradient, Observer, Shard


class GradientObserver(Observer):
    """An adapter whose gradient is what ``step()`` finds in ``.grad``: scaled, clipped or edited as the program wants.

    A subclass observes the chunks.
    """

    ranks = Ranks()

    def __init__(self) -> None:
        self.window = 0
        self._norms = ChunkNorms()
        self._layouts: dict[Tensor, ShardLayout] = {}
        self._ranks_agree = False

    def layout(self, tensor: Tensor) -> ShardLayout:
        """Return the tensor as one layer; a DTensor that has taken a parameter's place in its group, too."""
        if tensor not in self._layouts:
            self._layouts[tensor] = ShardLayout.of(f"param_{len(self._layouts)}", tensor)
        return self._layouts[tensor]

    def _name_of(self, param: Tensor) -> str:
        return self._layouts[param].layers[0].name

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Require, once and after ``add_param_group()``, that all ranks train the same. A collective.

        Raises:
            RuntimeError: on all ranks, saying in which parameters or arguments they differ.
        """
        if not self._ranks_agree and world.group() is not None:
            remark = "torch's ZeroRedundancyOptimizer does not, and DeepSpeed ZeRO takes its place"
            checks.require_agreement(checks.table_of_optimizer(optimizer, {}), remark)
        self._ranks_agree = True

    def has_bad(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the verdict on all ranks' chunks and on what is in ``.grad``. A collective of all ranks."""
        grads = self._gradients(tensors)
        return checks.any_rank_has_bad(self._norms, grads, world.group(), self.ranks.device or grads[0].device)

    def _gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return what this rank has in ``.grad``, in as few tensors as it lies in."""
        return [local_gradient(tensor) for tensor in tensors if tensor.grad is not None]

    def bad_gradients(self) -> list[BadGradient]:
        """Return the bad gradients of all ranks. A collective of all ranks."""
        return checks.gather_bad(self._norms, self._name_of, world.group())

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """End the window here."""
        error = on_bad_gradient()
        self.after_step()
        if error is not None:
            raise error

    def gradient(self, shard: Shard, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """Return what is in ``.grad``: the caller may have scaled or clipped it, and only the caller knows how."""
        return shard.grad, None

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of ``tensors``' gradients, which are the whole model; a collective for DTensors."""
        return self._norm(self._by_ranks(tensors))

    def clip(self, tensors: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip as torch does; a collective for DTensors."""
        if not tensors:
            return torch.zeros(())
        found = self._by_ranks(tensors)
        norm, grads = self._norm(found), [grad for alike in found.values() for grad in alike]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for dtype in {grad.dtype for grad in grads}:
            alike = [grad for grad in grads if grad.dtype == dtype]
            torch._foreach_mul_(alike, factor.to(alike[0].device, dtype))
        return norm

    def _by_ranks(self, tensors: Sequence[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
        """Return the gradients by the process groups that share them."""
        found: dict[tuple[Any, ...], list[Tensor]] = {}
        for tensor in tensors:
            found.setdefault(self.layout(tensor).layers[0].groups, []).append(tensor)
        return {groups: self._gradients(alike) for groups, alike in found.items()}

    def _norm(self, grads: Mapping[tuple[Any, ...], list[Tensor]]) -> Tensor:
        squares = []
        for groups, alike in grads.items():
            norms = torch.stack(torch._foreach_norm(alike, 2, dtype=SUM_DTYPE))
            squares.append(norms.square().sum().to(self.ranks.device or norms.device))
            for group in groups:
                torch.distributed.all_reduce(squares[-1], group=group)
        return torch.stack(squares).sum().sqrt()

    def drop(self) -> None:
        """Forget the window's chunks with its gradients."""
        self.after_step()

    def after_step(self) -> None:
        """End the window with the step."""
        self.window += 1
        self._norms.clear()
        if self.comparison is not None:
            self.comparison.clear()
