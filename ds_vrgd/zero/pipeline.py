"""DeepSpeed's pipeline engine: where its micro-batches end, and the weights of which several stages hold a copy.

The engine has no method that it calls after every backward pass on every stage, and it steps without ``step()``. What
it does follows a schedule of instructions, so ours join it. The steps of the stages' schedules correspond to each
other, and a barrier between two of them is harmless (``PipeSchedule`` says so): so the copies of a weight meet at the
end of the step in which the first of their stages, the last to get there, has run the micro-batch backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
    ReduceTiedGrads,
    TrainSchedule,
)
from deepspeed.utils import logger
from torch import Tensor

from ds_vrgd.moments import ChunkNorms, CopiedMoments, ReplicatedMoments, Route, ShardedMoments, WithCopies

Engine = Any


class EndMicroBatch(PipeInstruction):  # type: ignore[misc]
    """A backward pass of this stage is over."""


class MeetCopies(PipeInstruction):  # type: ignore[misc]
    """The copies of the weights that are tied under ``key`` hand each other a micro-batch's gradients."""


class EndBackward(PipeInstruction):  # type: ignore[misc]
    """All backward passes of this batch are over, and no gradient has been reduced yet."""


class ObservedSchedule(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's schedule for training, with our instructions in it.

    Args:
        schedule: the one that the engine would follow.
        first_stages: by the key of tied weights that this stage has a copy of: the first stage that has one.
    """

    def __init__(self, schedule: TrainSchedule, first_stages: Mapping[str, int]) -> None:
        super().__init__(schedule.micro_batches, schedule.stages, schedule.stage_id)
        self._first_stages = dict(first_stages)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """As DeepSpeed's, step by step."""
        first = [TrainSchedule(self.micro_batches, self.stages, stage).steps() for stage in self._first_stages.values()]
        for commands, *theirs in zip(super().steps(), *first, strict=True):
            observed: list[PipeInstruction] = []
            tail: list[PipeInstruction] = []
            for command in commands:
                (tail if isinstance(command, ReduceTiedGrads | ReduceGrads | OptimizerStep) else observed).append(
                    command
                )
                if isinstance(command, BackwardPass):
                    observed.append(EndMicroBatch())
            for key, of_first in zip(self._first_stages, theirs, strict=True):
                if any(isinstance(command, BackwardPass) for command in of_first):
                    observed.append(MeetCopies(key=key))
            yield [*observed, *([EndBackward()] if tail else []), *tail]


class Follower:
    """Tells an observer what it must know of a batch that a pipeline engine trains on.

    Args:
        engine: the pipeline engine.
        end_micro_batch: to be called when a backward pass of this stage is over.
        copied: moments of the observed weights of which other stages hold copies.
    """

    def __init__(self, engine: Engine, end_micro_batch: Callable[[], None], copied: Mapping[Tensor, CopiedMoments]):
        tied = tied_weights(engine.module)
        self._first_stages = {weights.key: weights.first_stage for weights in tied}
        self._copied = {weights.key: [copied[p] for p in weights.params if p in copied] for weights in tied}
        self._schedule = engine._train_schedule
        self._open = False
        engine._train_schedule = self._begin
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            EndMicroBatch: lambda engine: end_micro_batch(),
            MeetCopies: lambda engine, key: self._meet(key),
            EndBackward: lambda engine: self._end_backward(),
        }

    def refuse_broken_batch(self) -> None:
        """Train on no further batch where one has broken off.

        Raises:
            RuntimeError: one has.
        """
        if self._open:
            raise RuntimeError(
                "the batch before this one broke off (an exception, such as running out of memory), and DeepSpeed has "
                "taken in a part of its gradients that it cannot give back. Start again from the last checkpoint; do "
                "not catch exceptions around engine.train_batch()."
            )

    def _begin(self) -> ObservedSchedule:
        schedule = self._schedule()
        if type(schedule) is not TrainSchedule:
            raise RuntimeError(
                f"the pipeline engine follows a {type(schedule).__name__}, and ds_vrgd knows where micro-batches end "
                "in deepspeed's TrainSchedule alone. Use deepspeed.PipelineModule as it is."
            )
        self._open = True
        return ObservedSchedule(schedule, self._first_stages)

    def _meet(self, key: str) -> None:
        for moments in self._copied[key]:
            moments.meet()

    def _end_backward(self) -> None:
        for of_key in self._copied.values():
            for moments in of_key:
                moments.land()

    @property
    def has_copies(self) -> bool:
        """Whether this stage holds a copy of anything."""
        return bool(self._copied)

    def close(self) -> None:
        """The engine has stepped or skipped the step."""
        self._open = False


@dataclass(frozen=True)
class Tied:
    """Weights that this stage and others hold a copy of.

    Attributes:
        key: of their ``TiedLayerSpec``.
        params: this stage's copies.
        group: process group of the stages' ranks, of equal data-parallel index, by ascending stage.
        first_stage: the lowest of the stages.
    """

    key: str
    params: tuple[Tensor, ...]
    group: Any
    first_stage: int


def tied_weights(module: Any) -> list[Tied]:
    """What is tied across stages, in an order that is the same on all of them; nothing but for a ``PipelineModule``."""
    if not isinstance(module, PipelineModule):
        return []
    found = []
    for key, comm in module.tied_comms.items():
        if len(comm["ranks"]) > 1:
            params = tuple(module._recursive_getattr(comm["module"], name) for name in comm["weight_attr"])
            stage = min(module.topology().get_coord(rank).pipe for rank in comm["ranks"])
            found.append(Tied(key, params, comm["group"], stage))
    return found


def cut_with_copies(
    routes: Sequence[Route],
    rank: int,
    tied: Mapping[Tensor, Any],
    make: Callable[[Sequence[Route], ChunkNorms | None], ShardedMoments],
    norms: ChunkNorms | None,
) -> WithCopies:
    """Moments of a stage that has copies of tied weights, where layers are cut over the data-parallel ranks.

    Args:
        routes: of all observed parameters.
        rank: this one's, among the data-parallel ranks.
        tied: by observed weight, the process group of its copies.
        make: moments of some of them.
        norms: takes the norms of this rank's gradients.
    """
    copied, runs = {}, []
    for route in routes:
        if route.param in tied:
            # Stands for a shard of this weight's elements alone, and has no memory.
            key = torch.zeros((), device=route.shard.device).expand(dict(route.runs).get(rank, 0))
            own = replace(route, shard=key, shard_start=0)
            copied[route.param] = CopiedMoments(route.param, tied[route.param], make([own], None), norms)
            runs.append((route, own))
    rest = [route for route in routes if route.param not in tied]
    return WithCopies(make(rest, norms) if rest else None, copied, runs)


def whole_with_copies(
    params: Sequence[Tensor],
    tied: Mapping[Tensor, Any],
    make: Callable[[Sequence[Tensor], ChunkNorms | None], ReplicatedMoments],
    norms: ChunkNorms | None,
) -> WithCopies:
    """As :func:`cut_with_copies`, where every data-parallel rank holds whole layers."""
    copied = {param: CopiedMoments(param, tied[param], make([param], None), norms) for param in params if param in tied}
    rest = [param for param in params if param not in tied]
    return WithCopies(make(rest, norms) if rest else None, copied)


def refuse_to_save(engine: Engine) -> None:
    """Without ZeRO, in bf16, DeepSpeed cuts the state over the ranks and saves the first one's part: say so at once."""
    if engine.zero_optimization() or not isinstance(engine.optimizer, BF16_Optimizer):
        return
    reason = (
        "PipelineModule in bf16 with zero_optimization.stage=0: DeepSpeed cuts the optimizer's state over the "
        "data-parallel ranks, as at stage 1, but saves one rank's alone, and cannot load it. Use stage 1"
    )
    if engine.global_rank == 0:
        logger.warning(f"{reason}. Training goes on, and saving a checkpoint will be an error.")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ValueError(f"{reason}.")

    engine.save_checkpoint = engine.load_checkpoint = refuse


def _other_pipeline(engine: Engine) -> str | None:
    if isinstance(engine, PipelineEngine) and type(engine) is not PipelineEngine:
        return f"{type(engine).__name__}: it follows a schedule of its own. Use deepspeed.PipelineModule"
    return None


def _sequence_parallel_pipeline(engine: Engine) -> str | None:
    if isinstance(engine, PipelineEngine) and engine.sequence_parallel_size > 1:
        return (
            f"PipelineModule with sequence_parallel_size={engine.sequence_parallel_size}: not verified yet. Use "
            "either, with data parallelism"
        )
    return None


def _norm_of_first_stage(engine: Engine) -> str | None:
    clips = engine.gradient_clipping() > 0.0
    if (
        isinstance(engine, PipelineEngine)
        and clips
        and engine.zero_optimization_stage() == 0
        and not engine.bfloat16_enabled()
    ):
        return (
            f"gradient_clipping={engine.gradient_clipping()} with PipelineModule and zero_optimization.stage=0 in "
            "fp32: DeepSpeed clips by the norm of the first stage's gradients alone. Use stage 1, or set it to 0"
        )
    return None


def _unsummed_copies(engine: Engine) -> str | None:
    model, accumulation = engine.get_data_types()
    in_bf16_optimizer = model == torch.bfloat16 and accumulation == torch.float32 and not engine.zero_cpu_offload()
    if tied_weights(engine.module) and model != accumulation and not in_bf16_optimizer:
        return (
            f"data_types.grad_accum_dtype={engine._config.grad_accum_dtype} with TiedLayerSpec at stage 1: DeepSpeed "
            "leaves the stages' gradients of tied weights unsummed. Leave out grad_accum_dtype"
        )
    return None


def _universal_pipeline(engine: Engine) -> str | None:
    if isinstance(engine, PipelineEngine) and engine.load_universal_checkpoint():
        return (
            "checkpoint.load_universal=true with PipelineModule: ds-vrgd to-universal knows no stages. Set it to "
            "false: a checkpoint loads as it is at the same number of stages and ranks"
        )
    return None


#: Refusals: each takes the engine.
PIPELINE: tuple[Callable[[Engine], str | None], ...] = (
    _other_pipeline,
    _sequence_parallel_pipeline,
    _norm_of_first_stage,
    _unsummed_copies,
    _universal_pipeline,
)
