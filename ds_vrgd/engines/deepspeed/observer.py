"""Observation inside a DeepSpeed engine, next to its own reduction or instead of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_vrgd.engines.deepspeed import parallel
from ds_vrgd.engines.deepspeed.chunks import Chunks
from ds_vrgd.engines.deepspeed.edited import EditDetector, let_others_run_first
from ds_vrgd.engines.deepspeed.exchanges import build_exchange
from ds_vrgd.engines.deepspeed.fused import choose_reduction
from ds_vrgd.engines.deepspeed.held import GradientScale, clear, complete, offloads, reuses_buffers
from ds_vrgd.engines.deepspeed.wrappers import holdings_of
from ds_vrgd.moments import (
    SUM_DTYPE,
    ChunkNorms,
    Discards,
    GradientHook,
    Layer,
    Moments,
    Ranks,
    ShardLayout,
)
from ds_vrgd.optim.checks import any_rank_has_bad, gather_bad
from ds_vrgd.optim.observer import BadGradient, Observer, Shard

Engine = Any


def observer_of(engine: Engine) -> EngineObserver:
    """Return the observer of an engine around one of our optimizers.

    Raises:
        TypeError: its optimizer is another.
    """
    observer = getattr(engine.basic_optimizer, "observer", None)
    if not isinstance(observer, EngineObserver):
        raise TypeError(f"the engine's {type(engine.basic_optimizer).__name__} is not an optimizer of ds_vrgd")
    return observer


class EngineObserver(Observer):
    """The observer of an engine's gradients, which learns from the engine where windows begin and end.

    Attributes:
        mode: "fused", "observe", or "off" where DeepSpeed's reduction is left alone (``gamma=1``).
        why: what decided on the mode.
        partition: process group over which the optimizer wrapper cuts the parameters; None where it keeps them whole.
        tensors: the optimizer's on this rank, by param group, also while DeepSpeed keeps them out of the groups.
        copied: by observed weight of which other stages hold copies, the exchange of its gradients.
        chunks: where chunks begin and end; None for a pipeline, whose schedule decides it.
        ranks, window, judges, comparison: as in :class:`~ds_vrgd.optim.observer.Observer`.

    Raises:
        RuntimeError: the optimizer wrapper is unknown.
        ValueError: fused mode was asked for, and would not be exact here.
    """

    def __init__(self, engine: Engine) -> None:
        optimizer = engine.basic_optimizer
        reduces = any(group["gamma"] < 1.0 for group in optimizer.param_groups)
        # LARS and LAMB take the mean from the exchange, too: DeepSpeed rounds its own to the dtype of the wire.
        exchanges = reduces or optimizer.sums_layers or optimizer.watch is not None
        fused, self.why = (
            choose_reduction(engine, optimizer.reduction, optimizer.watch) if exchanges else (False, "gamma=1")
        )
        self._holdings = holdings = holdings_of(engine, every_group=fused)
        self.partition, self.tensors = holdings.group, tuple(holdings.layouts)
        self.mode = "fused" if fused else "observe" if holdings.routes or holdings.copies else "off"
        self.window = 0
        self._wrapper = engine.optimizer
        self._fused = engine.optimizer if fused else None
        self._micro_batches = self._k = 0
        self._stepping = self._warned_of_edit = False
        self._params = [param for param in engine.param_names if param.requires_grad]
        self._trained = [False] * len(self._params)  # in this window
        self._names = engine.param_names | parallel.expert_names(engine.param_names)
        self._own_hooks = {hook.id for hook in getattr(engine.optimizer, "_grad_acc_hooks", ())}
        self._at_boundary = engine.is_gradient_accumulation_boundary
        # With a loss scale, infinities are its business: it skips the step, on all ranks, and is lowered.
        self._scaler = engine.torch_autocast_z0_gradscaler
        scaled = engine.fp16_enabled() or self._scaler is not None
        self._norms = None if scaled else ChunkNorms()
        # In fp32 without ZeRO the optimizer has the model's parameters, and their gradients are all there is.
        self._scale = None if engine.optimizer is engine.basic_optimizer else GradientScale(engine)
        # Verdicts, such as to skip a step, are taken by all ranks together; chunks are the data-parallel ranks'.
        self._everyone = engine.seq_data_parallel_group
        if torch.distributed.get_world_size(self._everyone) < torch.distributed.get_world_size():
            self._everyone = torch.distributed.group.WORLD
        self._model_parallel = engine.mpu.get_model_parallel_group() if engine.mp_world_size > 1 else None
        self.ranks = Ranks(engine.device)
        self._moments, self._hooked, self.copied = build_exchange(
            engine, holdings, self._norms, fused=fused, variance=reduces, compares=optimizer.watch is not None
        )
        self.judges, self.comparison = self._moments is not None, getattr(self._moments, "comparison", None)
        self._hooks = [GradientHook(param, self.on_gradient) for param in self._hooked]
        self._edits = EditDetector(engine, [self._name_of(param) for param in self.copied])
        # Gradients of several micro-batches stay in .grad at stage 0, and at stage 1 next to DeepSpeed's reduction.
        accumulates = bool(holdings.copies) or (not fused and engine.zero_optimization_stage() == 1)
        self._discards = Discards() if accumulates and not isinstance(self._wrapper, BF16_Optimizer) else None
        self.chunks: Chunks | None = None
        if self._moments is not None and not isinstance(engine, PipelineEngine):
            hold, waits = self._moments.hold_back, bool(holdings.copies)
            self.chunks = Chunks(engine, self._name_of, self.end_micro_batch, hold, waits=waits)
            if self._fused is not None:
                self._fused.came = self.chunks.came
            else:
                others = set(self._params) - set(self._hooked)
                self._hooks += [GradientHook(param, self.chunks.reached) for param in others]
        # DeepSpeed's norm counts a copy on the first tensor-parallel rank alone; that of fused mode sees every copy.
        self._norm_is_partial = self.mode == "observe" and parallel.tensor_parallel_group(engine) is not None
        if self._norm_is_partial and self._norms is not None:
            self._hooks += [GradientHook(param, self.on_left_out) for param in self._left_out()]

    # -- what the engine reports (attach.py) --------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin a backward pass of the engine; called once or more often in a pass."""
        assert self.chunks is not None
        assert self._moments is not None
        begins = self.chunks.begin_pass()
        if self._fused is not None:
            self._fused.edits.come_last(begins=begins)
        else:
            let_others_run_first(self._hooked, self._own_hooks)
        if self._discards is None:
            return
        # Forget the chunks of gradients that were set to zero since the last backward pass.
        self._discards.look()
        discarded = self._discards.found()
        is_all = bool(discarded) and self._discards.are_all(discarded)
        if is_all:  # what was zero by itself goes, too; what is not observed may stay
            self.chunks.begin_anew()
            self._micro_batches = 0
            self._moments.reset()
        else:
            for param in discarded:
                self._moments.drop(param)
        self._discards.clear()

    def on_gradient(self, param: Tensor, grad: Tensor) -> None:
        """Take a gradient that DeepSpeed reduces itself, as it leaves autograd."""
        if self.chunks is None or self.chunks.came(param):
            assert self._moments is not None
            self._moments.add(param, grad)

    def on_left_out(self, param: Tensor, grad: Tensor) -> None:
        """Record the norm of a gradient that nobody else looks at."""
        if self._norms is not None and (self.chunks is None or self.chunks.is_running):
            self._norms.note(self._micro_batches, [(param, grad)])

    def end_pass(self) -> None:
        """End a backward pass of the engine, after what DeepSpeed does then."""
        if self._scale is not None:
            self._scale.record_loss_scale()
        if self.chunks is not None:
            self.chunks.end_pass()
            if self.chunks.is_open and isinstance(self._wrapper, ZeROOptimizer):
                # DeepSpeed counts forward passes: at stage 3 a second backward pass would overwrite the first's sum.
                self._wrapper.clear_backward_seen_flag()
        if self._fused is None and offloads(self._wrapper) and self._at_boundary():
            with self.thawed():
                complete(self._wrapper)
        if self._discards is not None:
            self._discards.record(self._hooked)

    @contextmanager
    def thawed(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Enclose a reduction, to which parameters that were frozen within the window are as if they were not.

        DeepSpeed would lose the gradients of their earlier micro-batches, or those of other ranks, or take older ones.
        """
        self._trained = [was or param.requires_grad for was, param in zip(self._trained, self._params, strict=True)]
        pairs = zip(self._trained, self._params, strict=True)
        frozen = [param for was, param in pairs if was and not param.requires_grad]
        for param in frozen:
            param.requires_grad_(True)
        try:
            yield
        finally:
            for param in frozen:
                param.requires_grad_(False)

    def end_micro_batch(self) -> None:
        """Count a chunk that is complete."""
        self._micro_batches += 1
        if self._scale is not None:
            self._scale.record_loss_scale()
        if self._fused is not None:
            self._fused.end_micro_batch()
        elif self._moments is not None:
            self._moments.end_micro_batch()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose the engine's step, unless a backward pass of the window never ended: a RuntimeError then."""
        if self.chunks is not None:
            self.chunks.refuse_broken_pass()
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def end_window(self) -> None:
        """Begin the next window: the engine has stepped, or has skipped the step because of an overflow."""
        self.window += 1
        self._begin_window(clears=reuses_buffers(self._wrapper))

    def drop(self) -> None:
        """Forget the window's micro-batches, whose gradients the program has thrown away.

        Does nothing while the engine steps, which ends with DeepSpeed's own ``zero_grad()``.
        """
        if not self._stepping and self._moments is not None:
            if self.chunks is not None:
                self.chunks.forget()
            self._begin_window(clears=True)

    def _begin_window(self, *, clears: bool) -> None:
        self._micro_batches = 0
        self._trained = [False] * len(self._params)
        if self._moments is not None:
            self._moments.reset()
        if self._fused is not None:
            self._fused.forget()
        elif self._scale is not None and clears:
            clear(self._wrapper)
        if self._discards is not None:
            self._discards.clear()

    def detach(self) -> None:
        """Stop observing: the engine is gone, or another one has replaced it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._fused is not None:
            self._fused.unfuse()
            self._fused = None
        if self._moments is not None:
            self._moments.detach()

    # -- what the engine holds ----------------------------------------------------------------------------------------

    def layout(self, tensor: Tensor) -> ShardLayout:
        """Return what one of the optimizer's tensors holds."""
        return self._holdings.layouts[tensor]

    def observed_layers(self) -> list[Layer]:
        """Return the layers whose chunk gradients are observed, in the order of the optimizer's tensors."""
        params = [*(route.param for route in self._holdings.routes), *self._holdings.copies.values()]
        names, layouts = {self._name_of(param) for param in params}, self._holdings.layouts.values()
        return [layer for layout in layouts for layer in layout.layers if layer.name in names]

    def _left_out(self) -> list[Tensor]:
        """Return the parameters that neither DeepSpeed's norm counts on this rank nor the exchange observes."""
        layers = [layer for layout in self._holdings.layouts.values() for layer in layout.layers]
        names = {layer.name for layer in layers if not layer.counted} - {layer.name for layer in self.observed_layers()}
        return [param for param, name in self._names.items() if name in names and param.requires_grad]

    def _name_of(self, param: Tensor) -> str:
        return str(self._names[param])

    def held_bytes(self) -> tuple[int, int]:
        """Return the bytes held on this rank now, outside a backward pass: of moments, and of exchange buffers."""
        return (0, 0) if self._moments is None else self._moments.held_bytes()

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that this rank sends to others: per micro-batch, and per step."""
        return (0, 0) if self._moments is None else self._moments.sent_bytes()

    # -- what the optimizer asks for in step() ------------------------------------------------------------------------

    def finish(self) -> int:
        """Return the window's k; a collective where the ranks hold whole parameters."""
        self._k = 0 if self._moments is None else self._moments.finish()
        return self._k

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        """Judge by the norm just formed over the whole model, where there is one, and by what that leaves out."""
        if self._norms is None:
            return False
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        device = self.ranks.device or tensors[0].device
        if self._scale is None or norm is None:
            # A shard's padding is uninitialised memory; whole tensors have none.
            whole = [] if self._holdings.routes else tensors
            grads = [tensor.grad for tensor in whole if tensor.grad is not None]
            return bool(any_rank_has_bad(self._norms, grads, self._everyone, device))
        norm = torch.as_tensor(norm)
        if bool(~torch.isfinite(norm) | (norm < 0)):  # DeepSpeed marks what it rejects by -1; all ranks have one norm
            return True
        # DeepSpeed's norm leaves gradients out, and is formed after edits, which may have hidden what is not finite.
        is_partial = self._norm_is_partial or (self.mode == "observe" and self.chunks is not None)
        return is_partial and bool(any_rank_has_bad(self._norms, (), self._everyone, device))

    def bad_gradients(self) -> list[BadGradient]:
        """Return the gradients of all ranks' chunks that are not finite; a collective."""
        return gather_bad(self._norms, self._name_of, self._everyone)

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """Make DeepSpeed count the step as skipped, like its own skipped steps; the window's end reports why."""
        self._wrapper.overflow = True

    def was_skipped(self) -> bool:
        """Return whether the step that the engine has just taken was left out for a gradient that is not finite."""
        return self._norms is not None and bool(getattr(self._wrapper, "overflow", False))

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of one of the optimizer's tensors, flat.

        Raises:
            RuntimeError: it is a whole parameter that was frozen when the engine was built.
        """
        if self._fused is not None:
            moments: Moments = self._fused.edits.unedited(tensor)
            return moments
        if self.partition is None and tensor not in self._holdings.copies:
            raise RuntimeError(
                f"'{self.layout(tensor).layers[0].name}' was frozen when the engine was built, so that its chunks have "
                "not been observed. Build the engine while it is not frozen (it may be frozen afterwards), or a new one"
            )
        assert self._moments is not None
        return self._moments.moments(self._holdings.copies.get(tensor, tensor))

    def gradient(self, shard: Shard, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """Return the mean of the chunks, summed in fp32, at the scale of the gradient that DeepSpeed handed over.

        Where somebody has edited the gradient since it was reduced, the edited values replace the mean.
        """
        if self._scale is not None and self._fused is not None:  # the total itself is in .grad, and not scaled yet
            return shard.grad, self._scale.of_total(shard.grad.device).to(shard.grad.dtype)
        if self._scale is None or moments is None:
            return shard.grad, None
        layout, gradient = shard.layout, shard.grad.flatten()
        of_total = self._scale.of_total(gradient.device)
        factor = (of_total * (self._micro_batches / moments.parts)).to(moments.total.dtype)
        edited = self._edits.find(gradient, layout, moments, self._k // layout.share, self._micro_batches, self._scale)
        if not edited:
            return moments.total, factor
        if not self._warned_of_edit:
            self._warned_of_edit = True
            logging.getLogger("ds_vrgd").warning(
                "the gradient of '%s'%s is not the mean of its chunks: it was edited between backward() and step() "
                "(safe_set_full_grad, a hook). It is used as it is, and the ratio stays that of the chunks. If your "
                "program edits no gradient, DeepSpeed's reduction is at fault: please report it. Reported once.",
                layout.layers[edited[0].layer].name,
                f" and of {len(edited) - 1} more layers" if len(edited) > 1 else "",
            )
        mean = moments.total * factor
        growth = of_total / self._scale.handed(gradient.device)
        for segment in edited:
            run = slice(segment.start, segment.start + segment.numel)
            mean[run] = gradient[run] * growth
        return mean, None

    def unit(self, k: int) -> float:
        """Undo DeepSpeed's factor: it multiplies the loss by its scale, and divides it by the accumulation steps.

        A window may have another number of micro-batches. Where DeepSpeed divides by nothing, the program is taken to
        have divided by that number.
        """
        divided_by = 1 if self.chunks is None else self.chunks.divided_by
        micro_batches = divided_by if divided_by > 1 else self._micro_batches
        if self._scaler is not None:
            return float(micro_batches / self._scaler.get_scale())
        return micro_batches / (1.0 if self._scale is None else self._scale.of_loss)

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the clipped mean gradient over the whole model."""
        device = tensors[0].device
        if self._scale is not None:
            return (self._scale.norm(device) * self._scale.clipping(device)).to(SUM_DTYPE)
        counted = [tensor.grad for tensor in tensors if self.layout(tensor).layers[0].counted]
        norms = [torch.linalg.vector_norm(grad, dtype=SUM_DTYPE) for grad in counted if grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=SUM_DTYPE, device=device), *norms]))
        if self._model_parallel is not None:
            torch.distributed.all_reduce(norm.square_(), group=self._model_parallel)
            norm.sqrt_()
        return norm
