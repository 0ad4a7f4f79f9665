"""Observation without an engine: one process, or DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE, Ranks, ReplicatedMoments, ShardLayout

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
        return self._moments.finish()

    def moments(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """``mean`` and ``m2`` over all chunks of the window, flat."""
        assert self._moments is not None
        return self._moments.moments(tensor)

    def gradient(self, tensor: Tensor, mean: Tensor) -> Tensor:
        """What is in ``.grad``: the caller may have scaled or clipped it, and only the caller knows how."""
        assert tensor.grad is not None
        return tensor.grad

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm over ``tensors``' gradients, which are the whole model here."""
        return norm_of_gradients(tensors)

    def after_step(self) -> None:
        """The window ends with the step."""
        self.window += 1
        self._open = False
        if self._moments is not None:
            self._moments.reset()


def norm_of_gradients(tensors: Sequence[Tensor]) -> Tensor:
    """2-norm over the gradients of ``tensors``, each of them whole."""
    return torch.stack([tensor.grad.to(SUM_DTYPE).norm() for tensor in tensors if tensor.grad is not None]).norm()


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
