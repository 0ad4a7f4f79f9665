"""Observation without an engine: one process, or DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_vrgd.moments import SUM_DTYPE, ChunkNorms, Moments, Ranks, ReplicatedMoments, ShardLayout
from ds_vrgd.optim import world
from ds_vrgd.optim.agreement import require_agreement, table_of_optimizer
from ds_vrgd.optim.nonfinite import BadGradient, any_rank_has_bad, gather_bad

if TYPE_CHECKING:
    from ds_vrgd.optim.base import VROptimizer

# Relative difference of the ranks' gradients, in sums, that is taken for none: DDP leaves the same bits on all of them.
SAME_GRADIENT = 1e-6


class PlainObserver:
    """Hooks on the parameters themselves; a micro-batch ends with its backward pass.

    With ``torch.distributed`` initialised, all its ranks are data-parallel replicas, as under DDP.

    Chunks are forgotten with the gradients that they made up: by ``step()``, by ``optimizer.zero_grad()``, and where
    ``.grad`` is None. One of these must follow a step that a loss scaler skips; ``model.zero_grad(set_to_none=False)``
    cannot be seen from here.

    Args:
        param_groups: of the optimizer; groups with ``gamma=1`` are not observed.
    """

    ranks = Ranks()

    def __init__(self, param_groups: Sequence[dict[str, Any]]) -> None:
        self.window = 0
        self._layouts: dict[Tensor, ShardLayout] = {}
        self._observed: list[Tensor] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._arrived: dict[Tensor, Tensor] = {}
        self._moments: ReplicatedMoments | None = None
        self._norms = ChunkNorms()
        self._backward = -1
        self._unfinished: dict[int, set[Tensor]] = {}
        self._ranks_agree = self._gradients_agree = False
        for group in param_groups:
            self.watch(group)

    def watch(self, group: dict[str, Any]) -> None:
        """Observe the parameters of one more param group, but the frozen ones."""
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            _refuse_dtensor(param)
            name = names[index] if names else f"param_{len(self._layouts)}"
            self._layouts[param] = ShardLayout.whole(name, param.numel())
        if group["gamma"] < 1.0:
            trained = [param for param in group["params"] if param.requires_grad]
            self._observed += trained
            for param in trained:
                self._handles.append(param.register_hook(_Hook(self, param)))
                self._handles.append(param.register_post_accumulate_grad_hook(_AccumulatedHook(self)))
            if self._moments is not None:
                self._moments.extend(trained)
        self._ranks_agree = False

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _window(self) -> ReplicatedMoments:
        """The moments of the window that is open."""
        if self._moments is None:
            self._moments = ReplicatedMoments(self._observed, world.group(), norms=self._norms)
        return self._moments

    def on_gradient(self, param: Tensor, grad: Tensor) -> None:
        """See a gradient of one parameter, before any reduction; torch.autograd.grad() may have asked for it."""
        if grad.layout is not torch.strided:
            raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
        if param.grad is None:
            self._forget(param)
        self._expect_end()
        self._arrived[param] = grad

    def _forget(self, param: Tensor) -> None:
        """The gradient that this parameter's chunks made up was thrown away."""
        self._window().restart(param)
        for params in self._unfinished.values():
            params.discard(param)

    def on_accumulated(self, param: Tensor) -> None:
        """Take the gradient of one parameter that arrived last: it is in ``.grad`` now, and so belongs to a chunk."""
        grad = self._arrived.pop(param, None)
        if grad is not None:
            # It was added to .grad, or copied there. If it has become .grad itself, by somebody's hook, it can still
            # change in this pass, and what changes it is not of this chunk.
            is_grad = param.grad is not None and param.grad.data_ptr() == grad.data_ptr()
            self._window().add(param, grad, keep=not is_grad)
            self._unfinished.setdefault(self._backward, set()).add(param)

    def _expect_end(self) -> None:
        """Have the backward pass that is running call back at its end."""
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(backward))

    def _end_backward(self, backward: int) -> None:
        """A backward pass is over; the micro-batch is, too, unless the pass ran inside another one."""
        self._unfinished.pop(backward, None)
        outer = torch._C._current_autograd_node()
        if outer is None:
            self._arrived.clear()
            self._window().end_micro_batch()
            return
        # A reentrant checkpoint ran it. The outer pass goes on where that one's node hands its gradient to.
        for node, _ in outer.next_functions:
            if node is not None:
                node.register_prehook(lambda grads: self._expect_end())

    def layout(self, tensor: Tensor) -> ShardLayout:
        """The whole tensor as one layer."""
        return self._layouts[tensor]

    def agree(self, optimizer: VROptimizer) -> None:
        """Once, and again after ``add_param_group()``: do the ranks train the same? A collective under DDP.

        Raises:
            RuntimeError: on all ranks, naming the parameters or arguments in which they differ.
        """
        if not self._ranks_agree and world.group() is not None:
            require_agreement(
                table_of_optimizer(optimizer, {}),
                "torch's ZeroRedundancyOptimizer does not, and DeepSpeed ZeRO takes its place",
            )
        self._ranks_agree = True

    def finish(self) -> int:
        """Merge the ranks' moments; a collective under DDP.

        Raises:
            RuntimeError: on all ranks, where they differ in their parameters, chunks or gradients.
        """
        if not self._observed:
            return 0
        moments = self._window()
        for param in self._observed:
            if param.grad is None:
                self._forget(param)
        self._refuse_broken_pass()
        k = moments.finish()
        if moments.ranks > 1 and not self._gradients_agree:
            self._check_gradients()
            self._gradients_agree = True
        return k

    def _refuse_broken_pass(self) -> None:
        held = {param for params in self._unfinished.values() for param in params}
        if held:
            name = self._layouts[next(iter(held))].layers[0].name
            raise RuntimeError(
                f"a backward pass of this window broke off (an exception, such as running out of memory), and .grad of "
                f"{len(held)} parameters, '{name}' among them, holds a part of it. Call optimizer.zero_grad() where "
                "you catch the exception, and begin the window again."
            )

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        """Of any rank's chunks, or of what is in ``.grad``."""
        grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
        return any_rank_has_bad(self._norms, grads, world.group(), grads[0].device)

    def bad_gradients(self) -> list[BadGradient]:
        """Of all ranks."""
        return gather_bad(self._norms, lambda param: self._layouts[param].layers[0].name, world.group())

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """The window ends here."""
        error = on_bad_gradient()
        self.after_step()
        if error is not None:
            raise error

    def _check_gradients(self) -> None:
        """Once: do the ranks hold the same gradient?"""
        grads = [param.grad.flatten() for param in self._observed if param.grad is not None]
        sums = torch.stack([grad.sum(dtype=SUM_DTYPE) for grad in grads]).sum()
        size = torch.stack([torch.linalg.vector_norm(grad, 1, dtype=SUM_DTYPE) for grad in grads]).sum()
        extremes = torch.stack([sums, -sums, size]).nan_to_num_()
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        largest, minus_smallest, most = extremes.tolist()
        if largest + minus_smallest > SAME_GRADIENT * most:
            raise RuntimeError(
                "the ranks hold different gradients, so what step() is handed is not the mean of the chunks. Under "
                "torch.distributed the model must be wrapped in DistributedDataParallel or a DeepSpeed engine."
            )

    def moments(self, tensor: Tensor) -> Moments:
        """Over all chunks of the window, flat.

        Raises:
            RuntimeError: the parameter was frozen when the optimizer was given it.
        """
        try:
            return self._window().moments(tensor)
        except KeyError:
            raise RuntimeError(
                f"'{self._layouts[tensor].layers[0].name}' was frozen when the optimizer was given it, so its chunks "
                "were not observed: unfreeze parameters before you make the optimizer, or before add_param_group()."
            ) from None

    def gradient(self, tensor: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """What is in ``.grad``: the caller may have scaled or clipped it, and only the caller knows how."""
        assert tensor.grad is not None
        return tensor.grad, None

    def unit(self, k: int) -> float:
        """The micro-batches of one rank: the loss of each is taken to be divided by them.

        A loss scale is the caller's business, and not known here.
        """
        return k / self._window().ranks

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm over ``tensors``' gradients, which are the whole model here."""
        return norm_of_gradients(tensors, tensors[0].device)

    def after_step(self) -> None:
        """The window ends with the step."""
        self.window += 1
        self._unfinished.clear()
        if self._moments is not None:
            self._moments.reset()


def norm_of_gradients(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """2-norm over the gradients of ``tensors``, a scalar on ``device``, where they are; 0 of none."""
    norms = [torch.linalg.vector_norm(tensor.grad, dtype=SUM_DTYPE) for tensor in tensors if tensor.grad is not None]
    none = torch.zeros((), dtype=SUM_DTYPE, device=device)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([none, *norms]))
    return norm


class _Hook:
    """A tensor hook that does not keep its observer alive: an optimizer that is dropped stops observing."""

    def __init__(self, observer: PlainObserver, param: Tensor) -> None:
        self._observer = weakref.ref(observer)
        self._param = weakref.ref(param)

    def __call__(self, grad: Tensor) -> None:
        observer, param = self._observer(), self._param()
        if observer is not None and param is not None:
            observer.on_gradient(param, grad)


class _AccumulatedHook:
    """A hook behind the accumulation into ``.grad``, which does not keep its observer alive either."""

    def __init__(self, observer: PlainObserver) -> None:
        self._observer = weakref.ref(observer)

    def __call__(self, param: Tensor) -> None:
        observer = self._observer()
        if observer is not None:
            observer.on_accumulated(param)


def _refuse_dtensor(param: Tensor) -> None:
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(param, DTensor):
            raise ValueError(
                "parameters that are DTensors (FSDP2, tensor parallelism) are not supported: their whole-layer sums "
                "would be silently local. Use DistributedDataParallel, or DeepSpeed ZeRO stage 0 to 3."
            )
