"""The chunks of an engine: which of its backward passes make one, and when it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.engines.patches import Patches

# What ``_running`` is between the call of engine.backward() and the first hook of the pass.
ANNOUNCED = -1


class Chunks:
    """The chunk that is open in an engine; follows the engine's passes, and reports when the chunk is complete.

    A chunk is what this rank computes between two calls of ``engine.step()``, in one backward pass or in several.
    Where the program owns the accumulation boundary and need not call ``step()`` after each micro-batch
    (``set_gradient_accumulation_boundary``, ``managed_gradient_accumulation=false``, ``no_sync``), a forward pass after
    a backward pass begins a new chunk as well. A pass that brings no gradient is no chunk, nor a part of one.

    An exchange that sends gradients during the backward pass must know whether another pass of the same chunk follows.
    One does after ``engine.backward(loss, retain_graph=True)``, and where more than one forward pass came first. Then
    gradients are held back until the chunk is complete.

    Args:
        engine, name_of: the engine, and the name of a parameter for messages.
        complete: called when a chunk is complete, on all ranks alike.
        hold: called with True for a chunk whose gradients must not leave yet, and with False when they may.
        waits: nothing leaves during the backward pass, so that every chunk may wait for its last pass.

    Attributes:
        is_open: whether a pass has brought gradients of a chunk that is not complete.
        divided_by: by how much DeepSpeed has divided the loss of the last pass (``scale_wrt_gas``); 1 for not at all.
    """

    def __init__(
        self, engine: Any, name_of: Callable[[Tensor], str], complete: Callable[[], None],
        hold: Callable[[bool], None], *, waits: bool,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._name_of, self._complete, self._hold, self._waits = name_of, complete, hold, waits
        self._in_forward = False
        self._running: int | None = None  # the backward pass, by autograd's number
        self._pass_brought = self._pass_reached = False  # whether it has reached an observed, and any parameter
        self._one_pass_for_all = False
        self.divided_by: int = 1
        self.forget()

    def follow(self, patches: Patches) -> None:
        """Follow the engine's forward and backward passes and steps."""
        patches.within(self._engine, "forward", self._forward)
        patches.within(self._engine, "backward", self._backward)
        patches.within(self._engine, "_backward_prologue", self._boundary_if_last)
        patches.within(self._engine, "_backward_epilogue", self._boundary_if_last)
        patches.follow(self._engine, "step", before=self._end_micro_batch)

    def forget(self) -> None:
        """Begin anew: what the open chunk was made of is complete, or has been thrown away."""
        self.is_open: bool = False
        self._closed: bool = False
        self._owned: bool = False
        self._silent: bool = False
        self._another_follows: bool = False
        self._reduction_due = False
        self._forwards = self._passes = 0

    def begin_anew(self) -> None:
        """Begin the chunk anew, in a pass that has been announced: what it was made of has been thrown away."""
        self.is_open = self._closed = False
        self._passes = 0

    @contextmanager
    def _forward(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Follow a forward pass; without gradients it belongs to no chunk."""
        self._in_forward = True
        if torch.is_grad_enabled():
            owned = self._owned or self._program_owns_boundary()
            if owned and (self._silent or (self.is_open and self._passes)):
                self._close()
            if self._closed and self._owned:
                due = self._reduction_due  # of the window, if no further pass comes
                self.forget()
                self._reduction_due = due
            self._forwards += 1
        try:
            yield
        finally:
            self._in_forward = False

    @contextmanager
    def _backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Iterator[None]:
        """Follow a call of ``engine.backward()``."""
        self.refuse_broken_pass()
        self._running, self._another_follows = ANNOUNCED, retain_graph
        self.divided_by = self._engine.gradient_accumulation_steps() if scale_wrt_gas else 1
        try:
            yield
        except BaseException:
            if not self._pass_reached:  # nothing has happened, and no pass of this forward pass will come
                self._running, self._forwards = None, max(self._forwards - 1, 0)
            raise

    @contextmanager
    def _boundary_if_last(self) -> Iterator[None]:
        """Hide the accumulation boundary from DeepSpeed in a pass that another pass of its chunk may follow.

        At the boundary DeepSpeed reduces at the end of a pass, and what a further pass brings would be lost.
        """
        engine, boundary = self._engine, self._engine._is_gradient_accumulation_boundary
        self._owned = self._owned or self._program_owns_boundary()  # no_sync() may be left before the next pass
        announced = self._another_follows or self._passes + 1 < self._expected_passes()
        early = announced or self._is_frozen()
        self._reduction_due = early and self._pass_reached and engine.is_gradient_accumulation_boundary()
        if early:
            engine._is_gradient_accumulation_boundary = False
        try:
            yield
        finally:
            engine._is_gradient_accumulation_boundary = boundary

    def begin_pass(self) -> bool:
        """Begin a backward pass of the engine; return whether this is its first hook, and not a later one.

        :meth:`refuse_broken_pass` comes before.
        """
        backward, begins = torch._C._current_graph_task_id(), self._running in (None, ANNOUNCED)
        if not begins and self._running != backward:
            self.refuse_broken_pass()
        if self._running is None:  # of loss.backward()
            self.divided_by = self._engine.gradient_accumulation_steps()
        self._running = backward
        return begins

    def refuse_broken_pass(self) -> None:
        """Raise a RuntimeError if the window holds a part of a backward pass: training cannot continue with it."""
        if self._pass_reached:
            raise RuntimeError(
                "a backward pass of this window broke off (an exception, such as running out of memory), and DeepSpeed "
                "has reduced a part of its gradients and cannot undo that. Start again from the last checkpoint; "
                "do not catch exceptions around engine.backward()."
            )

    def came(self, param: Tensor) -> bool:
        """Return whether a gradient that arrives is of this engine; another's loss may run backward through its model.

        Raises:
            RuntimeError: it belongs to a chunk that has been exchanged.
        """
        if not self.is_running:
            return False
        if self._closed:
            raise RuntimeError(
                "a second backward pass between two calls of engine.step() brought a gradient of "
                f"'{self._name_of(param)}', but the two passes are one chunk and the first pass's gradients have been "
                "exchanged. Add the losses and call engine.backward() once, announce the second pass with "
                "engine.backward(first_loss, retain_graph=True), or call engine.step() after each micro-batch. LARS "
                'and LAMB need no exchange: reduction="observe" leaves DeepSpeed\'s reduction.'
            )
        if not self.is_open:
            self.is_open = True
            self._hold(self._another_follows or self._expected_passes() > 1)
        self._pass_brought = self._pass_reached = True
        return True

    def reached(self, param: Tensor, grad: Tensor) -> None:
        """Record that a gradient of a parameter has arrived that is not observed, and that DeepSpeed reduces alone."""
        self._pass_reached |= self.is_running

    def end_pass(self) -> None:
        """End a backward pass."""
        brought, self._running, self._pass_brought, self._pass_reached = self._pass_brought, None, False, False
        if brought:
            self._passes += 1
            if not (self._waits or self._another_follows or self._passes < self._expected_passes()):
                self._close()
        elif not (self.is_open or self._closed):
            self._forwards = 0
            self._silent |= not self._is_frozen()

    @property
    def is_running(self) -> bool:
        """Return whether the engine computes now, so that gradients that arrive are its own."""
        return self._running is not None or self._in_forward

    def _end_micro_batch(self) -> None:
        """Complete the chunk where ``engine.step()`` is called, at an accumulation boundary or before it.

        A rank whose pass brought no gradient has a chunk of zeros, for other ranks may have brought some. Through a
        frozen model, as a discriminator is while the generator's loss runs through it, no rank has.
        """
        due = self._reduction_due
        if self.is_open or (self._silent and not self._closed):
            self._close()
        self.forget()
        if not due:
            return
        # The pass that was expected has not come, and DeepSpeed still has to reduce. Its partitions of stages 2 and 3
        # are reduced already, as with managed_gradient_accumulation=false; to reduce nothing again fails at stage 2.
        if self._engine.zero_optimization_partition_gradients():
            self._engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            self._engine.allreduce_gradients()

    def _is_frozen(self) -> bool:
        return not any(param.requires_grad for param in self._engine.module.parameters())

    def _expected_passes(self) -> int:
        """Return the number of backward passes that follow from the forward passes so far."""
        return 1 if self._one_pass_for_all else self._forwards

    def _close(self) -> None:
        if self._forwards > 1:
            self._one_pass_for_all = self._passes == 1
        self.is_open, self._closed = False, True
        self._hold(False)
        self._complete()

    def _program_owns_boundary(self) -> bool:
        by_hand = self._engine._is_gradient_accumulation_boundary is not None or self._engine.inside_no_sync_ctxt
        return bool(by_hand or not self._engine.managed_gradient_accumulation())
