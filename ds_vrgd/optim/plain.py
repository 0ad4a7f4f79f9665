"""The adapter without an engine: one process, or DistributedDataParallel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import (
    SUM_DTYPE,
    BackwardPasses,
    Discards,
    GradientHook,
    Moments,
    ReplicatedMoments,
    ShardLayout,
    is_dtensor,
    weakly,
    zeros_among,
)
from ds_vrgd.optim import checks, world
from ds_vrgd.optim.gradient import GradientObserver

# Relative difference of the ranks' gradients, in sums, up to which they count as equal: DDP leaves the same bits.
SAME_GRADIENT = 1e-6


class PlainObserver(GradientObserver):
    """An adapter through hooks on the parameters themselves; a micro-batch ends with its backward pass.

    With ``torch.distributed`` initialised, all its ranks are data-parallel replicas, as under DDP.

    A chunk is one outermost backward pass that brought gradients of observed parameters, as they leave autograd: after
    every tensor hook.
    Chunks are forgotten with the gradients that they made up: by ``step()``, by ``optimizer.zero_grad()``, and where
    ``.grad`` is None or was set to zero since the last backward pass.

    Args:
        groups: the optimizer's param groups; those with ``gamma=1`` are not observed.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._handles: list[GradientHook | torch.utils.hooks.RemovableHandle] = []
        self._moments: ReplicatedMoments | None = None
        self._discards = Discards()
        self._passes = BackwardPasses(self._end_pass)
        self.unused = True
        self.reload(groups)

    def reload(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Observe the param groups that a checkpoint has brought, whose gamma may differ; always True.

        An open window stays open: its gradients are still in ``.grad``, so its chunks are kept.
        """
        self._remove_hooks()
        self._layouts = {}
        self._observed: list[Tensor] = []
        self._gradients_agree = False
        moments, self._moments = self._moments, None
        for group in groups:
            self.add_group(group)
        if moments is not None and moments.any_chunks:
            moments.observe(self._observed)
            self._moments = moments
        return True

    def add_group(self, group: dict[str, Any]) -> None:
        """Observe the parameters of one more param group except for the frozen ones."""
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            name = names[index] if names else f"param_{len(self._layouts)}"
            self._layouts[param] = ShardLayout.of(name, param)
        if group["gamma"] < 1.0:
            # The gradient of a DTensor has been reduced when it comes to the parameter: `attach` sees it before.
            trained = [param for param in group["params"] if param.requires_grad and not is_dtensor(param)]
            self._observed += trained
            for param in trained:
                self._handles.append(GradientHook(param, self.on_gradient))
                self._handles.append(param.register_post_accumulate_grad_hook(weakly(self.on_accumulated)))
            if self._moments is not None:
                self._moments.observe(self._observed)
        self._ranks_agree = self._layers_are_whole = False

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def detach(self) -> None:
        """Remove the hooks, and let go of the moments."""
        self._remove_hooks()
        self._moments = None
        self._norms.clear()
        self._discards.clear()

    def require_whole_layers(self, optimizer: str, groups: Sequence[dict[str, Any]]) -> None:
        """Require that the parameters are whole layers, once."""
        if not self._layers_are_whole:
            for group in groups:
                checks.require_whole_layers(optimizer, group, stepping=True)
            self._layers_are_whole = True

    def only_makes_state(self, grads: Sequence[Tensor], *, rates_are_zero: bool) -> bool:
        """Return whether a first step only makes the state, as ``torch.distributed.checkpoint`` primes an optimizer.

        Its gradients are all zero, and no backward pass has brought them or every learning rate is zero.
        """
        observed = self._moments is not None and self._moments.any_chunks
        return (rates_are_zero or not observed) and not any(bool(grad.count_nonzero()) for grad in grads)

    def _window(self) -> ReplicatedMoments:
        """Return the moments of the window that is open."""
        if self._moments is None:
            self._moments = ReplicatedMoments(self._observed, world.group(), norms=self._norms)
        return self._moments

    def on_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Take a gradient of one parameter that autograd is about to accumulate, before any reduction."""
        if grad.layout is not torch.strided:
            raise ValueError("sparse gradients are not supported: build the embedding with sparse=False")
        if self._passes.begins:
            self._look_for_discarded()
        if param.grad is None:
            self._forget(param)
        self._passes.take(param)
        # Autograd adds it to .grad or copies it there, since it is held here too.
        self._window().add(param, grad, keep=True)

    def _forget(self, param: Tensor) -> None:
        """Forget the chunks of a parameter whose gradient was thrown away."""
        self._window().drop(param)
        self._passes.forget(param)

    def _look_for_discarded(self) -> None:
        """Look which gradients were set to zero since the last backward pass: their chunks are forgotten at its end."""
        self._forget_discarded()  # which the last pass did not come to, where it broke off
        for param in zeros_among(self._passes.unfinished):
            self._forget(param)
        self._discards.look()

    def _forget_discarded(self) -> None:
        discarded = self._discards.found()
        # With all the others, a gradient that was zero by itself, or has no elements, was thrown away as well.
        for param in self._observed if discarded and self._discards.are_all(discarded) else discarded:
            self._window().drop_complete(param)

    def on_accumulated(self, param: Tensor) -> None:
        """Copy the last gradient where a hook has made ``.grad`` of the same memory."""
        if param.grad is not None:
            self._window().keep_apart(param, param.grad)

    def _end_pass(self) -> None:
        """End a backward pass, and with it the micro-batch."""
        self._forget_discarded()
        self._window().end_micro_batch()
        # DDP changes .grad in a callback of its own, which may have been queued after this one.
        record = functools.partial(self._discards.record, self._observed)
        torch.autograd.Variable._execution_engine.queue_callback(record)

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Require that all ranks step; once, and after ``add_param_group()``, that they train the same. A collective.

        Raises:
            RuntimeError: on all ranks that step, saying how many do not, or in which parameters or arguments they
                differ.
        """
        if world.group() is not None and self._observed:
            checks.require_everyone(self._observed[0].device)
        super().agree(optimizer)

    def announce(self, optimizer: str, k: int) -> None:
        """Report k, layers and parameters on the first rank."""
        ranks, numels = self._window().ranks, [param.numel() for param in self._layouts if param.requires_grad]
        world.announce(
            f"{optimizer}: k = {k} ({ranks} rank{'s' * (ranks > 1)} x {k // ranks} micro-batch"
            f"{'es' * (k > ranks)}) in the first step; {'DDP' if ranks > 1 else 'one process'}, GSNR through hooks; "
            f"{len(numels)} layers, {sum(numels):,} parameters"
        )

    def finish(self) -> int:
        """Merge the ranks' moments; a collective under DDP.

        Raises:
            RuntimeError: on all ranks, where they differ in their parameters, chunks or gradients.
        """
        if not self._observed:
            raise _unobserved("the parameters")
        moments = self._window()
        for param in self._observed:
            if param.grad is None:
                self._forget(param)
        if held := self._passes.unfinished:
            raise RuntimeError(
                f"a backward pass of this window broke off (an exception, such as running out of memory), and .grad of "
                f"{len(held)} parameters, '{self._name_of(next(iter(held)))}' among them, holds a part of it. Call "
                "optimizer.zero_grad() where you catch the exception, and begin the window again."
            )
        k = moments.finish()
        if moments.ranks > 1 and not self._gradients_agree:
            self._check_gradients()
            self._gradients_agree = True
        return k

    def _check_gradients(self) -> None:
        """Require, once, that the ranks hold the same gradient."""
        grads = [param.grad.flatten() for param in self._observed if param.grad is not None]
        sums = torch.stack([grad.sum(dtype=SUM_DTYPE) for grad in grads]).sum()
        size = torch.stack([torch.linalg.vector_norm(grad, 1, dtype=SUM_DTYPE) for grad in grads]).sum()
        extremes = torch.stack([sums, -sums, size]).nan_to_num_()
        torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX)
        largest, minus_smallest, most = extremes.tolist()
        if largest + minus_smallest > SAME_GRADIENT * most:
            raise RuntimeError(
                "the ranks hold different gradients, so what step() is given is not the mean of the chunks. Under "
                "torch.distributed the model must be wrapped in DistributedDataParallel or a DeepSpeed engine."
            )

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments over all chunks of the window, flat; RuntimeError for a parameter that was frozen."""
        try:
            return self._window().moments(tensor)
        except KeyError:
            raise _unobserved(f"'{self._name_of(tensor)}'") from None

    def unit(self, k: int) -> float:
        """Return the number of micro-batches of one rank: each loss counts as divided by it, and by no loss scale."""
        return k / self._window().ranks

    def after_step(self) -> None:
        """End the window with the step."""
        super().after_step()
        self.unused = False
        self._passes.clear()
        self._discards.clear()
        if self._moments is not None:
            self._moments.reset()


def _unobserved(what: str) -> RuntimeError:
    return RuntimeError(
        f"the chunks of {what} were not observed: frozen when the optimizer was made. Unfreeze parameters before you "
        "make the optimizer, or before add_param_group()."
    )
