"""Connect one of our optimizers with the engine that was built around it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from ds_vrgd.optim import VROptimizer
from ds_vrgd.zero.fused import unfit
from ds_vrgd.zero.observer import EngineObserver
from ds_vrgd.zero.pipeline import Follower, refuse_to_save
from ds_vrgd.zero.refusals import guard_compile
from ds_vrgd.zero.restore import load_instead
from ds_vrgd.zero.sequences import sequence_groups
from ds_vrgd.zero.stages import StageStatistics
from ds_vrgd.zero.tensor_parallel import unmarked_splits
from ds_vrgd.zero.topology import ranks_per_node
from ds_vrgd.zero.wrappers import holdings_of

Engine = Any

# Weights that a warning names.
MOST_NAMES = 4


def attach(engine: Engine) -> None:
    """Let the engine's client optimizer observe the engine; does nothing for an optimizer that is not ours.

    Called when the engine has configured its optimizer.

    Raises:
        RuntimeError: the optimizer wrapper is none that is known.
        ValueError: fused mode was asked for, and would not be exact here.
    """
    optimizer = engine.basic_optimizer
    if not isinstance(optimizer, VROptimizer):
        return
    reduces = any(group["gamma"] < 1.0 for group in optimizer.param_groups)
    fused, why = choose_reduction(engine, optimizer.reduction) if reduces else (False, "gamma=1")
    holdings = holdings_of(engine, every_group=fused)
    _warn_of_unmarked(engine, type(optimizer).__name__)
    sequences = sequence_groups(engine) if reduces else None
    whole = () if sequences is None else sequences.members
    per_node = ranks_per_node(optimizer.ranks_per_node, engine.device, holdings.group, whole) if holdings.routes else 1
    observer = EngineObserver(engine, holdings, fused=fused, ranks_per_node=per_node, sequences=sequences, why=why)
    optimizer.observe(observer)
    guard_compile(engine)
    load_instead(engine)
    end = WindowEnd(optimizer, observer)
    if isinstance(engine, PipelineEngine):
        if reduces:
            _merge_statistics(engine, optimizer, observer)
        _attach_pipeline(engine, observer, end)
    else:
        _call_after(engine, "_backward_epilogue", observer.end_micro_batch)
        if reduces:
            _call_before(engine, "_backward_prologue", observer.begin_micro_batch)
            _call_before(engine, "_take_model_step", observer.refuse_broken_pass)
        _call_after(engine, "_take_model_step", end.close)
        _call_after(engine, "step", end.complain)
    if engine.global_rank == 0:
        layers = sum(len(layout.layers) for layout in holdings.layouts.values())
        logger.info(
            f"{type(optimizer).__name__}: {layers} layers under {type(engine.optimizer).__name__}; "
            f"{'fused with' if fused else 'beside'} DeepSpeed's reduction: {why}"
        )


def _attach_pipeline(engine: Engine, observer: EngineObserver, end: WindowEnd) -> None:
    """The pipeline engine follows a schedule, and has no ``backward()`` and no ``step()`` of its own."""
    refuse_to_save(engine)
    follower = Follower(engine, observer.end_micro_batch, observer.copied)
    _call_before(engine, "train_batch", follower.refuse_broken_batch)
    _call_after(engine, "_take_model_step", follower.close)
    _call_after(engine, "_take_model_step", end.close)
    if follower.has_copies:
        # Each stage updates its copy by sums that it forms in an order of its own.
        _call_after(engine, "_take_model_step", engine.module._synchronize_tied_weights)
    _call_after(engine, "train_batch", end.complain)


def _merge_statistics(engine: Engine, optimizer: VROptimizer, observer: EngineObserver) -> None:
    """Give every rank of a pipeline what all stages have measured."""
    stages = StageStatistics(observer.observed_layers(), engine.mpu.get_pipe_parallel_group(), engine.device)

    def merge() -> None:
        if engine.was_step_applied():
            optimizer.merge_statistics(stages.merge)

    _call_after(engine, "_take_model_step", merge)


def choose_reduction(engine: Engine, wanted: str) -> tuple[bool, str]:
    """Whether to replace DeepSpeed's reduction, and why.

    Args:
        engine: the engine, built.
        wanted: the optimizer's argument ``reduction``: auto, fused, observe.

    Raises:
        ValueError: fused mode was asked for, and would not be exact here.
    """
    if wanted == "observe":
        return False, 'reduction="observe"'
    reason = unfit(engine)
    if reason is None:
        return True, f'reduction="{wanted}"'
    if wanted == "fused":
        raise ValueError(f'reduction="fused" cannot serve this configuration: {reason}; or set reduction to "auto".')
    return False, reason


def _warn_of_unmarked(engine: Engine, optimizer: str) -> None:
    unmarked = unmarked_splits(engine)
    if unmarked and engine.global_rank == 0:
        shown = ", ".join(f"'{name}'" for name in unmarked[:MOST_NAMES])
        logger.warning(
            f"{optimizer}: {len(unmarked)} weights differ between tensor-parallel ranks and are not marked as split: "
            f"{shown}{', ...' if len(unmarked) > MOST_NAMES else ''}. Each rank's is taken for a layer of its own, and "
            "DeepSpeed counts the first rank's alone in the norm of the gradient. Set tensor_model_parallel=True on "
            "parts of one weight, before deepspeed.initialize; give copies of one weight the same values."
        )


class WindowEnd:
    """What follows the engine's step.

    An error waits until ``engine.step()`` is through, so that a program that catches it finds the engine as after any
    skipped step.
    """

    def __init__(self, optimizer: VROptimizer, observer: EngineObserver) -> None:
        self._optimizer = optimizer
        self._observer = observer
        self._error: FloatingPointError | None = None

    def close(self) -> None:
        """The engine has stepped or skipped the step: say why, and forget the window."""
        if self._observer.was_skipped():
            self._error = self._optimizer.on_bad_gradient()
        self._observer.end_window()

    def complain(self) -> None:
        """Raise what there is to be raised."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _call_before(engine: Engine, name: str, first: Callable[[], None]) -> None:
    """Have ``first`` called before every call of one of this engine's methods."""
    method = getattr(engine, name)

    @functools.wraps(method)
    def preceded(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    setattr(engine, name, preceded)


def _call_after(engine: Engine, name: str, then: Callable[[], None]) -> None:
    """Have ``then`` called after every successful call of one of this engine's methods."""
    method = getattr(engine, name)

    @functools.wraps(method)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(engine, name, followed)
