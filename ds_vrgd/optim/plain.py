"""Observation without an engine: one process, or DistributedDataParallel."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE, Ranks, ReplicatedMoments, ShardLayout

# Cosine between the mean of the chunks and the gradient that step() is handed. Clipping leaves it at 1, rounding to bf16 at
# 0.99999; a model that is not wrapped in DDP has about 1/sqrt(ranks) in the noise-dominated regime.
SAME_DIRECTION = 0.9


class PlainObserver:
    """Hooks on the parameters themselves; a micro-batch ends with its backward pass.

    With ``torch.distributed`` initialised, all its ranks are data-parallel replicas, as under DDP.

    Args:
        param_groups: of the optimizer; groups with ``gamma=1`` are not observed.
    """

    ranks = Ranks()

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.window = 0
        self._layouts: dict[Tensor, ShardLayout] = {}
        self._observed: list[Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._moments: ReplicatedMoments | None = None
        self._open = False
        self._compared = False
        for group in param_groups:
            self.watch(group)

    def watch(self, group: dict[str, Any]) -> None:
        """Observe the parameters of one more param group."""
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            _refuse_dtensor(param)
            name = names[index] if names else f"param_{len(self._layouts)}"
            self._layouts[param] = ShardLayout.whole(name, param.numel())
            if group["gamma"] < 1.0 and param.requires_grad:
                self._observed.append(param)
                self._handles.append(param.register_hook(_Hook(self, param)))

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def on_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Take one micro-batch's gradient of one parameter, before any reduction."""
        if self._moments is None:
            spread = torch.distributed.is_available() and torch.distributed.is_initialized()
            self._moments = ReplicatedMoments(self._observed, torch.distributed.group.WORLD if spread else None)
        if not self._open:
            self._open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_micro_batch)  # type: ignore[attr-defined]
        if param.grad is None:
            self._moments.restart(param)
        self._moments.add(param, grad)

    def _end_micro_batch(self) -> None:
        self._open = False
        if self._moments is not None:
            self._moments.end_micro_batch()

    def layout(self, tensor: Tensor) -> ShardLayout:
        """The whole tensor as one layer."""
        return self._layouts[tensor]

    def finish(self) -> int:
        """Merge the ranks' moments; a collective under DDP."""
        if self._moments is None:
            return 0
        k = self._moments.finish()
        if not self._compared and k >= 2:
            self._compared = True
            self._compare()
        return k

    def _compare(self) -> None:
        """Once: is the gradient handed to ``step()`` really the mean of the observed chunks?"""
        assert self._moments is not None
        product = norms = handed = 0.0
        for param in self._observed:
            if param.grad is not None:
                grad, mean = param.grad.flatten().double(), self._moments.moments(param)[0].double()
                product += float(grad @ mean)
                norms += float(mean @ mean)
                handed += float(grad @ grad)
        cosine = product / math.sqrt(norms * handed) if norms * handed > 0 else 1.0
        if cosine < SAME_DIRECTION:
            message = (
                f"the gradient handed to step() points elsewhere than the mean of the observed chunks (cosine {cosine:.3f}). "
                "Is the model wrapped in DistributedDataParallel, and does every backward pass accumulate into .grad?"
            )
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise RuntimeError(message)
            warnings.warn(message, stacklevel=2)

    def moments(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """``mean`` and ``m2`` over all chunks of the window, flat."""
        assert self._moments is not None
        return self._moments.moments(tensor)

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm over ``tensors``' gradients, which are the whole model here."""
        return torch.stack([tensor.grad.to(SUM_DTYPE).norm() for tensor in tensors if tensor.grad is not None]).norm()

    def after_step(self) -> None:
        """The window ends with the step."""
        self.window += 1
        self._open = False
        if self._moments is not None:
            self._moments.reset()


class _Hook:
    """A tensor hook that does not keep its observer alive: an optimizer that is dropped stops observing."""

    def __init__(self, observer: PlainObserver, param: Tensor) -> None:
        self._observer = weakref.ref(observer)
        self._param = weakref.ref(param)

    def __call__(self, grad: Tensor) -> None:
        observer, param = self._observer(), self._param()
        if observer is not None and param is not None:
            observer.on_gradient(param, grad)


def _refuse_dtensor(param: Tensor) -> None:
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(param, DTensor):
            raise ValueError(
                "parameters that are DTensors (FSDP2, tensor parallelism) are not supported: their whole-layer sums would be "
                "silently local. Use DistributedDataParallel, or DeepSpeed ZeRO stage 0 to 3."
            )
