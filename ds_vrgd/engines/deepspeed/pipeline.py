"""DeepSpeed's pipeline engine: where its micro-batches end, the weights that stages share, statistics of all stages.

The engine has no method that it calls after every backward pass on every stage, and it steps without ``step()``. It
follows a schedule of instructions: two of them are wrapped, and one of ours joins the schedule. The steps of the
stages' schedules correspond to each other, and a barrier between two of them is harmless (see ``PipeSchedule``): the
copies of a weight are therefore summed at the end of the step in which the first of their stages, the last to get
there, has run the micro-batch backwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, PipeInstruction, ReduceTiedGrads, TrainSchedule
from torch import Tensor

from ds_vrgd.engines.deepspeed.parallel import Engine
from ds_vrgd.moments import CopiedMoments


class SumCopies(PipeInstruction):  # type: ignore[misc]
    """Sum a micro-batch's gradients over the copies of the weights that are tied under ``key``."""


class ObservedSchedule(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's schedule for training, with our instructions in it.

    ``first_stages`` has the first stage with a copy, by the key of tied weights of which this stage has one.
    """

    def __init__(self, schedule: TrainSchedule, first_stages: Mapping[str, int]) -> None:
        super().__init__(schedule.micro_batches, schedule.stages, schedule.stage_id)
        self._first_stages = dict(first_stages)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield DeepSpeed's instructions, step by step, and ours before its reduction."""
        first = [TrainSchedule(self.micro_batches, self.stages, stage).steps() for stage in self._first_stages.values()]
        for commands, *of_first in zip(super().steps(), *first, strict=True):
            end = next((i for i, command in enumerate(commands) if isinstance(command, ReduceTiedGrads)), len(commands))
            ours = [
                SumCopies(key=key)
                for key, theirs in zip(self._first_stages, of_first, strict=True)
                if any(isinstance(command, BackwardPass) for command in theirs)
            ]
            yield [*commands[:end], *ours, *commands[end:]]


class Follower:
    """Reports the micro-batches of a batch that a pipeline engine trains on to an observer.

    Args:
        engine: the pipeline engine.
        end_micro_batch: called when a backward pass of this stage is over.
        copied: moments of the observed weights of which other stages hold copies.
    """

    def __init__(self, engine: Engine, end_micro_batch: Callable[[], None], copied: Mapping[Tensor, CopiedMoments]):
        tied = tied_weights(engine.module)
        self._first_stages = {weights.key: weights.first_stage for weights in tied}
        of_keys = {weights.key: [copied[p] for p in weights.params if p in copied] for weights in tied}
        self.has_copies = bool(tied)
        self._schedule = engine._train_schedule
        self._open = False
        engine._train_schedule = self._begin
        instructions = dict(engine._INSTRUCTION_MAP)

        def backward(engine: Engine, **arguments: Any) -> None:
            instructions[BackwardPass](engine, **arguments)
            end_micro_batch()

        def reduce(engine: Engine) -> None:  # all backward passes of this batch are over
            for moments in itertools.chain(*of_keys.values()):
                moments.finish_exchange()
            instructions[ReduceTiedGrads](engine)

        def sum_copies(engine: Engine, key: str) -> None:
            for moments in of_keys[key]:
                moments.start_exchange()

        ours = {BackwardPass: backward, ReduceTiedGrads: reduce, SumCopies: sum_copies}
        engine._INSTRUCTION_MAP = instructions | ours

    def refuse_broken_batch(self) -> None:
        """Raise a RuntimeError if the batch before this one broke off: training cannot continue with its part."""
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
                "only in deepspeed's TrainSchedule. Use deepspeed.PipelineModule as it is."
            )
        self._open = True
        return ObservedSchedule(schedule, self._first_stages)

    def close(self) -> None:
        """End the batch: the engine has stepped or skipped the step."""
        self._open = False


class Tied(NamedTuple):
    """Weights of which this stage and others hold a copy."""

    key: str  # of their TiedLayerSpec
    params: tuple[Tensor, ...]  # this stage's copies
    group: Any  # process group of the stages' ranks, of equal data-parallel index, by ascending stage
    first_stage: int  # the lowest of the stages


def tied_weights(module: Any) -> list[Tied]:
    """Return what is tied across stages, in the same order on all of them; nothing for other than a PipelineModule."""
    if not isinstance(module, PipelineModule):
        return []
    found = []
    for key, comm in module.tied_comms.items():
        if len(comm["ranks"]) > 1:
            params = tuple(module._recursive_getattr(comm["module"], name) for name in comm["weight_attr"])
            stage = min(module.topology().get_coord(rank).pipe for rank in comm["ranks"])
            found.append(Tied(key, params, comm["group"], stage))
    return found
