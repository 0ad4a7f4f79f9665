"""What every training begins with: its output, the checkpoint that it goes on from, its engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed
from pydantic import BaseModel

from ds_vrgd.training import checkpoint
from ds_vrgd.training.output import AUTO, check_output
from ds_vrgd.training.ranks import Ranks
from ds_vrgd.training.resharding import fitting


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        ranks: of the run.
        output: folder of the run.
        resumption: the checkpoint to go on from; None where the run begins anew.
        finished: what to say where the run is finished already and there is nothing to do; else None.
    """

    ranks: Ranks
    output: Path
    resumption: checkpoint.Resumption | None = None
    finished: str | None = None

    @property
    def step(self) -> int:
        """Updates done."""
        return self.resumption.step if self.resumption else 0

    def check(self, description: dict[str, Any]) -> None:
        """Refuse a checkpoint of another run, see ``checkpoint.check``. Collective.

        Raises:
            InputError: it is one.
        """
        if resumption := self.resumption:
            self.ranks.on_rank_zero(lambda: checkpoint.check(resumption, description))

    def engine(self, model: Any, params: Iterable[Any], config: dict[str, Any]) -> Any:
        """DeepSpeed's engine around ``model``, as the checkpoint has left it. Collective.

        Args:
            params: parameters, or param groups.
            config: for ``deepspeed.initialize``; is told what it is to load.

        Raises:
            InputError: the checkpoint cannot be loaded, or not by so many ranks.
            TrainingFailed: it cannot be converted to so many ranks for want of disk.
        """
        found = self.resumption
        fits = fitting(found, self.ranks, self.output, config) if found else contextlib.nullcontext()
        with fits as source:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
            if source:
                checkpoint.load(engine, source)
        return engine


def begin(run: BaseModel, output: Path, resume: Path | Literal["auto"] | None) -> Start:
    """Look at what is there, before anything is written. Collective; torch.distributed is initialised.

    Args:
        run: the run file.
        output: folder to write into.
        resume: where a checkpoint is looked for. ``"auto"`` is the output, and no checkpoint there is no error: the run
            begins, so that the same command serves the first start and every later one.

    Raises:
        InputError: the output holds something else, or there is no whole checkpoint in ``resume``.
    """
    ranks = Ranks()
    finished = ranks.on_rank_zero(lambda: check_output(run, output, resume))
    if finished is not None:
        return Start(ranks, output, finished=finished)
    ranks.on_rank_zero(lambda: checkpoint.tidy(output))
    if resume is None:
        return Start(ranks, output)
    find = checkpoint.find_last if resume == AUTO else checkpoint.find
    resumption = ranks.on_rank_zero(lambda: find(output if resume == AUTO else resume))
    if resumption:
        checkpoint.verify(resumption, ranks)
    return Start(ranks, output, resumption)
