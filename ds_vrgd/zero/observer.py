"""Observation inside a DeepSpeed engine, beside its own reduction or in place of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ds_vrgd.moments import (
    SUM_DTYPE,
    ChunkNorms,
    CopiedMoments,
    Layer,
    Moments,
    Ranks,
    SequenceGroups,
    ShardLayout,
    WithCopies,
)
from ds_vrgd.optim import VROptimizer
from ds_vrgd.optim.nonfinite import BadGradient, any_rank_has_bad, gather_bad
from ds_vrgd.optim.plain import norm_of_gradients
from ds_vrgd.zero.exchanges import Cut, Whole, build_exchanges
from ds_vrgd.zero.groups import everyone, model_parallel_group
from ds_vrgd.zero.scale import GradientScale
from ds_vrgd.zero.wrappers import Holdings

Engine = Any


def observer_of(engine: Engine) -> EngineObserver:
    """The observer of an engine around one of our optimizers.

    Raises:
        TypeError: its optimizer is another.
    """
    observer = getattr(engine.basic_optimizer, "observer", None)
    if not isinstance(observer, EngineObserver):
        raise TypeError(f"the engine's {type(engine.basic_optimizer).__name__} is no optimizer of ds_vrgd")
    return observer


class EngineObserver:
    """Watches the model's parameters, and takes the engine's word for where micro-batches and windows end.

    Args:
        engine: the engine, built.
        holdings: what its optimizer wrapper holds.
        fused: replace the wrapper's reduction; else look on beside it, through hooks on the parameters.
        ranks_per_node: gradients travel among so many consecutive ranks, and only moments beyond them.
        sequences: which ranks share their samples; None where none do.
        why: what decided on ``fused``.

    Attributes:
        mode: "fused", "observe", or "off" where nothing is observed (``gamma=1``).
        why: as given.
    """

    def __init__(
        self,
        engine: Engine,
        holdings: Holdings,
        *,
        fused: bool,
        ranks_per_node: int,
        sequences: SequenceGroups | None = None,
        why: str = "",
    ) -> None:
        self.window = 0
        self.mode = "fused" if fused else "observe" if holdings.routes or holdings.copies else "off"
        self.why = why
        self._holdings = holdings
        self._fused = engine.optimizer if fused else None
        self._micro_batches = 0
        self._open_pass: int | None = None
        self._names = engine.param_names
        self._wrapper = engine.optimizer
        data_parallel = engine.seq_data_parallel_group
        # With a loss scale, infinities are its business: it skips the step, on all ranks, and is lowered.
        self._norms = None if is_loss_scaled(engine) else ChunkNorms()
        # In fp32 without ZeRO the optimizer has the model's parameters, and their gradients are all there is.
        self._scale = None if engine.optimizer is engine.basic_optimizer else GradientScale(engine)
        # Verdicts, such as to skip a step, are taken by all ranks together; chunks are the data-parallel ranks'.
        self._everyone = everyone(engine)
        # A pipeline's stages hold other layers, perhaps in other param groups: no call of step() concerns all of them.
        alike = data_parallel if isinstance(engine, PipelineEngine) else self._everyone
        self._model_parallel = model_parallel_group(engine)
        cut = any(layer.groups for layout in holdings.layouts.values() for layer in layout.layers)
        spread = cut or alike is not data_parallel
        self.ranks = Ranks(engine.device, alike if spread else None)
        exchanges = build_exchanges(
            engine, holdings, self._norms, fused=fused, ranks_per_node=ranks_per_node, sequences=sequences
        )
        self._cut, self._whole = exchanges.cut, exchanges.whole

    @property
    def _moments(self) -> Cut | Whole | None:
        return self._cut if self._cut is not None else self._whole

    @property
    def copied(self) -> Mapping[Tensor, CopiedMoments]:
        """By observed weight of which other ranks hold copies."""
        return self._moments.copied if isinstance(self._moments, WithCopies) else {}

    def begin_micro_batch(self) -> None:
        """A backward pass of the engine begins; called once or more often in a pass.

        Raises:
            RuntimeError: the one before never ended.
        """
        backward = torch._C._current_graph_task_id()
        if backward < 0 or backward != self._open_pass:  # DeepSpeed may call this before autograd runs: -1
            self.refuse_broken_pass()
        self._open_pass = backward

    def refuse_broken_pass(self) -> None:
        """Go no further with a window that holds a part of a backward pass.

        Raises:
            RuntimeError: there is one.
        """
        if self._open_pass is not None:
            raise RuntimeError(
                "a backward pass of this window broke off (an exception, such as running out of memory), and DeepSpeed "
                "has taken in a part of its gradients that it cannot give back. Start again from the last checkpoint; "
                "do not catch exceptions around engine.backward()."
            )

    def end_micro_batch(self) -> None:
        """A backward pass of the engine is over."""
        self._open_pass = None
        self._micro_batches += 1
        if self._scale is not None:
            self._scale.note_micro_batch()
        if self._fused is not None:
            self._fused.end_micro_batch()
        elif self._moments is not None:
            self._moments.end_micro_batch()

    def end_window(self) -> None:
        """The engine has stepped, or has skipped the step because of an overflow."""
        self.window += 1
        self._micro_batches = 0
        if self._moments is not None:
            self._moments.reset()

    @property
    def partition(self) -> Any | None:
        """Process group over which the optimizer wrapper cuts the parameters; None where it keeps them whole."""
        return self._holdings.group

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The optimizer's tensors on this rank, by param group, also while DeepSpeed keeps them out of the groups."""
        return tuple(self._holdings.layouts)

    def observed_layers(self) -> list[Layer]:
        """Those whose chunk gradients are observed, in the order of the optimizer's tensors."""
        held = self._holdings
        params = [*(route.param for route in held.routes), *held.copies.values()]
        names = {str(self._names[param]) for param in params}
        return [layer for layout in held.layouts.values() for layer in layout.layers if layer.name in names]

    def held_bytes(self) -> tuple[int, int]:
        """Bytes held on this rank now, outside a backward pass: of moments, and of exchange buffers."""
        return (0, 0) if self._moments is None else self._moments.held_bytes()

    def sent_bytes(self) -> tuple[int, int]:
        """Bytes of moments and gradients that this rank sends to others: in a micro-batch, and once a step."""
        return (0, 0) if self._moments is None else self._moments.sent_bytes()

    def layout(self, tensor: Tensor) -> ShardLayout:
        """What one of the optimizer's tensors holds."""
        return self._holdings.layouts[tensor]

    def agree(self, optimizer: VROptimizer) -> None:
        """The ranks were compared when the engine was built."""

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        """By the norm that DeepSpeed has just formed over the whole model, where it forms one."""
        if self._norms is None:
            return False
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        if self._scale is None or norm is None:
            # A shard's padding is uninitialised memory; whole tensors have none.
            grads = [tensor.grad for tensor in tensors if tensor.grad is not None and self._cut is None]
            return any_rank_has_bad(self._norms, grads, self._everyone, self.ranks.device or tensors[0].device)
        norm = torch.as_tensor(norm)
        return bool(~torch.isfinite(norm) | (norm < 0))  # DeepSpeed marks what it rejects by -1

    def bad_gradients(self) -> list[BadGradient]:
        """Of all ranks."""
        return gather_bad(self._norms, lambda param: str(self._names[param]), self._everyone)

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """Have DeepSpeed count the step as skipped, as it does its own; the window's end says why."""
        self._wrapper.overflow = True

    def was_skipped(self) -> bool:
        """Whether the step that the engine has just taken was left out for a gradient that is not finite."""
        return self._norms is not None and bool(getattr(self._wrapper, "overflow", False))

    def finish(self) -> int:
        """The window's k; a collective where the ranks hold whole parameters."""
        return 0 if self._moments is None else self._moments.finish()

    def moments(self, tensor: Tensor) -> Moments:
        """Of one of the optimizer's tensors, flat."""
        if self._cut is not None:
            return self._cut.moments(tensor)
        assert self._whole is not None
        return self._whole.moments(self._holdings.copies[tensor])

    def gradient(self, tensor: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """The mean of the chunks, summed in fp32, at the scale of the gradient that DeepSpeed handed over."""
        assert tensor.grad is not None
        if self._scale is not None and self._fused is not None:  # the total itself is in .grad, and not scaled yet
            return tensor.grad, self._scale.of_total(tensor.device).to(tensor.dtype)
        if self._scale is None or moments is None:
            return tensor.grad, None
        factor = self._scale.of_total(moments.total.device) * (self._micro_batches / moments.parts)
        return moments.total, factor.to(moments.total.dtype)

    def unit(self, k: int) -> float:
        """DeepSpeed multiplies the loss by its scale, and divides it by the number of micro-batches."""
        return self._micro_batches / (1.0 if self._scale is None else self._scale.of_loss)

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm of the clipped mean gradient over the whole model."""
        if self._scale is None:
            counted = [tensor for tensor in tensors if self.layout(tensor).layers[0].counted]
            norm = norm_of_gradients(counted, tensors[0].device)
            if self._model_parallel is not None:
                torch.distributed.all_reduce(norm.square_(), group=self._model_parallel)
                norm.sqrt_()
            return norm
        device = tensors[0].device
        return (self._scale.norm(device) * self._scale.clipping(device)).to(SUM_DTYPE)

    def after_step(self) -> None:
        """Nothing ends here: the engine may call ``step()`` again for another group of the same window."""


def is_loss_scaled(engine: Engine) -> bool:
    """Whether a loss scale decides which steps are skipped."""
    return bool(engine.fp16_enabled() or getattr(engine, "torch_autocast_z0_gradscaler", None) is not None)
