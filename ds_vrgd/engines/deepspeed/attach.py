"""Connect one of our optimizers with the engine that was built around it, until the engine is destroyed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger
from torch.utils.weak import WeakTensorKeyDictionary

from ds_vrgd.engines.deepspeed.checkpoints.restore import load_instead
from ds_vrgd.engines.deepspeed.held import reduce_rest, reduces_in_hooks_alone
from ds_vrgd.engines.deepspeed.observer import EngineObserver
from ds_vrgd.engines.deepspeed.parallel import Engine, chunk_ranks, unmarked_splits
from ds_vrgd.engines.deepspeed.pipeline import Follower
from ds_vrgd.engines.deepspeed.refusals import guard_compile, guard_saving
from ds_vrgd.engines.deepspeed.versions import check_engine
from ds_vrgd.engines.patches import Patches
from ds_vrgd.engines.stages import StageStatistics
from ds_vrgd.optim import VROptimizer, world

# Weights that a warning names.
MOST_NAMES = 4


def attach(engine: Engine) -> None:
    """Let the client optimizer of an engine, which is built, observe it; does nothing for one that is not ours.

    Raises:
        RuntimeError: the optimizer wrapper is unknown, or DeepSpeed lacks what is needed of it.
        ValueError: fused mode was asked for, and would not be exact here.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, VROptimizer):
        return
    check_engine(engine, deepspeed.__version__)
    if not engine.torch_autocast_enabled() and hasattr(engine.optimizer, "torch_autocast_gradscaler"):
        engine.optimizer.torch_autocast_gradscaler = None  # DeepSpeed makes one after an engine with fp16 autocast
    name, observer, unmarked = type(optimizer).__name__, EngineObserver(engine), unmarked_splits(engine)
    if unmarked and engine.global_rank == 0:
        shown = ", ".join(f"'{weight}'" for weight in unmarked[:MOST_NAMES])
        logger.warning(
            f"{name}: {len(unmarked)} weights differ between tensor-parallel ranks and are not marked as split: "
            f"{shown}{', ...' if len(unmarked) > MOST_NAMES else ''}. Each rank's counts as a layer of its own, and "
            "DeepSpeed counts the first rank's alone in the norm of the gradient. Set tensor_model_parallel=True on "
            "parts of one weight, before deepspeed.initialize; give copies of one weight the same values."
        )
    optimizer.observe(observer)
    guard_compile(engine)
    load_instead(engine)
    attachment = Attachment(engine, optimizer, observer)
    (attachment.follow_pipeline if isinstance(engine, PipelineEngine) else attachment.follow)(engine)
    world.announce(f"{name}: {_description(engine, observer)}")


def _description(engine: Engine, observer: EngineObserver) -> str:
    """Return what an engine trains, and how, in one line."""
    ranks, steps = chunk_ranks(engine), engine.gradient_accumulation_steps()
    k = f"k = {ranks * steps} ({ranks} rank{'s' * (ranks > 1)} x {steps} micro-batch{'es' * (steps > 1)})"
    if not engine.managed_gradient_accumulation():
        k = f"k = {ranks} rank{'s' * (ranks > 1)} x the micro-batches between two steps"
    layers = [layer for tensor in observer.tensors for layer in observer.layout(tensor).layers]
    gsnr = "" if any(group["gamma"] < 1.0 for group in engine.basic_optimizer.param_groups) else "GSNR off, "
    mode = "DeepSpeed's mean" if observer.mode == "off" else f"{observer.mode} mode"
    sizes = f"{len(layers)} layers, {sum(layer.numel for layer in layers):,} parameters"
    where = " on the first pipeline stage" if isinstance(engine, PipelineEngine) else ""
    return (
        f"{k}; DeepSpeed ZeRO-{engine.zero_optimization_stage()} ({type(engine.optimizer).__name__}), {gsnr}{mode} "
        f"({observer.why}); {sizes}{where}"
    )


#: By parameter, what is attached to the engine that was built around it last; gone with that engine.
_ATTACHED: Any = WeakTensorKeyDictionary()


class Attachment:
    """The hooks and patches on one engine, its wrapper and its model, which go when the engine goes.

    It retires the attachments of earlier engines around the same parameters that nobody has destroyed: Trainers that
    are made in a loop leave their engines behind, with hooks on the model's parameters. The engine keeps it alive.
    """

    def __init__(self, engine: Engine, optimizer: VROptimizer, observer: EngineObserver) -> None:
        self._patches = Patches()
        self._engine = weakref.ref(engine)
        self._optimizer = optimizer
        self._observer = observer
        self._error: FloatingPointError | None = None
        self._params = [param for param in engine.param_names if param.requires_grad]  # engines may share frozen ones
        engine._ds_vrgd_attachment = self
        self._patches.follow(engine, "destroy", before=self.detach)
        for other in {other() for param in self._params if (other := _ATTACHED.get(param)) is not None} - {None}:
            other._retire()
        for param in self._params:
            _ATTACHED[param] = weakref.ref(self)

    def follow(self, engine: Engine) -> None:
        """Follow where passes, micro-batches and windows begin and end, and what is thrown away.

        A later patch of a method is outside the earlier ones. From the outside in, the engine's methods are now::

            forward             [chunks: a forward pass                                            ]
            backward            [chunks: announced with retain_graph?                              ]
            _backward_prologue  observer.begin_pass, [chunks hide the boundary: DeepSpeed          ]
            _backward_epilogue  [chunks hide the boundary: [thawed: DeepSpeed], observer.end_pass  ]
            step                chunks complete the chunk, DeepSpeed, raise what the window's end found
            _take_model_step    [observer.stepping: DeepSpeed, close the window                    ]
            zero_grad           DeepSpeed, observer.drop
        """
        observer, patches, finalize = self._observer, self._patches, "finalize_gradient_accumulation_boundary"
        # Where engine.backward() is given the loss as it left the model, DeepSpeed divides it at stage 0 and in
        # BF16_Optimizer whatever scale_wrt_gas is: by a hook that is there for loss.backward().
        patches.instead(
            engine,
            "_backward_prologue_per_tensor",
            lambda divide, grad: grad if engine._running_engine_backward else divide(grad),
        )
        for reduction in ("allreduce_gradients", "_backward_epilogue"):
            patches.within(engine, reduction, observer.thawed)
        if hasattr(engine.optimizer, finalize):
            patches.within(engine.optimizer, finalize, observer.thawed)
        patches.follow(engine, "_backward_epilogue", after=observer.end_pass)
        patches.within(engine, "_take_model_step", self._model_step)
        patches.follow(engine, "step", after=self._raise_error)
        if observer.mode != "fused" and reduces_in_hooks_alone(engine.optimizer):
            patches.follow(
                engine.optimizer, "reduce_gradients", before=functools.partial(reduce_rest, engine.optimizer)
            )
        if observer.chunks is not None:
            observer.chunks.follow(patches)
            patches.follow(engine, "_backward_prologue", before=observer.begin_pass)
            patches.follow(engine, "zero_grad", after=observer.drop)
            if engine.optimizer is not engine.basic_optimizer:  # else the optimizer itself calls drop()
                patches.follow(engine.optimizer, "zero_grad", after=observer.drop)

    def follow_pipeline(self, engine: Engine) -> None:
        """Follow the schedule of a pipeline engine, which has no ``backward()`` and no ``step()`` of its own."""
        observer, patches, stages = self._observer, self._patches, None
        if any(group["gamma"] < 1.0 for group in self._optimizer.param_groups):
            stages = StageStatistics(observer.observed_layers(), engine.mpu.get_pipe_parallel_group(), engine.device)
        guard_saving(engine)
        follower = Follower(engine, observer.end_micro_batch, observer.copied)

        def close_batch() -> None:
            if stages is not None and engine.was_step_applied():
                self._optimizer.layer_statistics = stages.merge(self._optimizer.layer_statistics)
            follower.close()
            self._close_window()
            if follower.has_copies:  # each stage updates its copy by sums that it forms in an order of its own
                engine.module._synchronize_tied_weights()

        patches.follow(engine, "_take_model_step", after=close_batch)
        patches.follow(engine, "train_batch", before=follower.refuse_broken_batch, after=self._raise_error)

    @contextmanager
    def _model_step(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        with self._observer.stepping():
            yield
            self._close_window()

    def _close_window(self) -> None:
        """Begin the next window after the engine has stepped, or find out why it has skipped the step.

        :meth:`_raise_error` raises after ``engine.step()``: who catches it finds the engine as after any skipped step.
        """
        if self._observer.was_skipped():
            self._error = self._optimizer.on_bad_gradient()
        self._observer.end_window()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def detach(self) -> None:
        """Stop observing, and remove all hooks and patches."""
        self._observer.detach()
        self._patches.undo()
        for param in self._params:
            if (current := _ATTACHED.get(param)) is not None and current() is self:
                del _ATTACHED[param]

    def _retire(self) -> None:
        """Leave the parameters to a later engine: this one cannot train any more, and reports so."""
        self.detach()
        engine = self._engine()
        if engine is not None:
            for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
                hook.remove()
            self._patches.follow(engine, "forward", before=_refuse_retired)


def _refuse_retired() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "this engine cannot train any more, because another engine has been built around its model since and "
            "receives the gradients. Train with the later engine, or call deepspeed.initialize again."
        )
