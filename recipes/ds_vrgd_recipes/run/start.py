"""The start of a run: the checkpoint to resume from, the engine, the log."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfigError
from tqdm import tqdm

from ds_vrgd.engines.deepspeed import CheckpointError, to_universal
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import InputError, TrainingFailed
from ds_vrgd_recipes.run.log import RunLog, begin_log, readable_log
from ds_vrgd_recipes.run.output import AUTO
from ds_vrgd_recipes.run.ranks import Ranks


def find_start(ranks: Ranks, output: Path, resume: Path | Literal["auto"] | None) -> checkpoint.Resumption | None:
    """Find the checkpoint to resume from; None where the run begins anew. Collective.

    Args:
        resume: folder in which a checkpoint is looked for. ``"auto"`` is the output, and no checkpoint there is no
            error: the run begins, so that the same command serves the first start and every later one.

    Raises:
        InputError: the output holds a damaged log, or there is no whole checkpoint in ``resume``.
    """
    ranks.on_rank_zero(lambda: checkpoint.tidy(output))
    ranks.on_rank_zero(lambda: len(readable_log(output)))
    if resume is None:
        return None
    find = checkpoint.find_last if resume == AUTO else checkpoint.find
    found = ranks.on_rank_zero(lambda: find(output if resume == AUTO else resume))
    if found:
        checkpoint.verify(found, ranks)
    return found


def rehearse(config: dict[str, Any], groups: Callable[[torch.nn.Module], Iterable[Any]]) -> None:
    """Build an engine around one small layer and drop it. Collective.

    What DeepSpeed or the optimizer refuses is then known before the hours that a preparation may take.

    Args:
        config: for ``deepspeed.initialize``.
        groups: makes the run's param groups of a network.

    Raises:
        InputError: the engine refuses the configuration.
    """
    off = {name: {"enabled": False} for name in ("tensorboard", "csv_monitor", "wandb", "comet")}
    model, logger = torch.nn.Linear(8, 8), logging.getLogger("ds_vrgd")
    level = logger.level
    logger.setLevel(logging.WARNING)  # the line that describes an engine is of the real one
    try:
        _initialize(model, groups(model), {**config, **off}).destroy()
    finally:
        logger.setLevel(level)


def start_engine(
    ranks: Ranks,
    output: Path,
    found: checkpoint.Resumption | None,
    model: torch.nn.Module,
    params: Iterable[Any],
    config: dict[str, Any],
) -> Any:
    """Build DeepSpeed's engine around ``model`` and load the checkpoint ``found``. Collective.

    Args:
        params: parameters, or param groups.
        config: for ``deepspeed.initialize``; :func:`fitting` adds what is to be loaded.

    Raises:
        InputError: the engine refuses the configuration, or the checkpoint cannot be loaded, or not by this number of
            ranks.
        TrainingFailed: there is no disk space to convert the checkpoint for this number of ranks.
    """
    ranks.on_rank_zero(lambda: begin_log(output))
    with fitting(found, ranks, output, config) if found else contextlib.nullcontext() as source:
        engine = _initialize(model, params, config)
        if source:
            checkpoint.load(engine, source)
    return engine


def open_log(ranks: Ranks, output: Path, step: int, engine: Any, monitored: Sequence[str]) -> RunLog | None:
    """Open the log of a run that has made ``step`` updates on rank 0; None on the others. Collective.

    Args:
        monitored: see ``RunLog``.

    Raises:
        InputError: a log or a CSV file in the output is damaged, on every rank.
    """
    opened: list[RunLog] = []
    ranks.on_rank_zero(lambda: opened.append(RunLog(output, step, engine.monitor, monitored)))
    return opened[0] if opened else None


@contextlib.contextmanager
def fitting(
    found: checkpoint.Resumption, ranks: Ranks, output: Path, config: dict[str, Any]
) -> Iterator[checkpoint.Resumption]:
    """Yield the checkpoint in a form that this number of ranks can load. Collective.

    The shards of another number of ranks are put together and cut anew, in ``output``. That needs as much disk space as
    the checkpoint, until the block is left (also by an exception). The global batch stays, and the order of the data,
    the masks and the dropout depend on the place in the global batch alone, so that only the order of sums differs.

    Args:
        config: of the engine that loads it; DeepSpeed learns from it what it is to load.

    Raises:
        InputError: the checkpoint cannot be converted.
        TrainingFailed: the conversion cannot be written.
    """
    converted = found.saved_ranks != ranks.size and found.is_sharded
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": converted}
    if not converted:
        yield found
        return
    folder = output / checkpoint.CONVERTED
    ranks.on_rank_zero(lambda: _convert(found, folder, ranks.size))
    try:
        yield replace(found, folder=folder)
        ranks.gather(None)  # all have read it
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _convert(found: checkpoint.Resumption, folder: Path, size: int) -> None:
    tqdm.write(f"checkpoint: {found.tag} was saved by {found.saved_ranks} ranks, cut anew for {size}")
    source = found.folder / found.tag
    try:
        to_universal(found.folder, folder, found.tag)
    except CheckpointError as error:
        raise InputError(f"--resume {source} with {size} ranks: {error}") from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TrainingFailed(
            f"checkpoint {source} could not be cut anew for {size} ranks: {error}. That takes as much space in "
            f"{folder} as the checkpoint: free it, or resume with {found.saved_ranks} ranks"
        ) from error


def _initialize(model: torch.nn.Module, params: Iterable[Any], config: dict[str, Any]) -> Any:
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    except (ValueError, TypeError, AssertionError, DeepSpeedConfigError) as error:
        reason = " ".join(str(error).split()) or f"{type(error).__name__} without a message"
        raise InputError(f"the engine refuses the DeepSpeed JSON: {reason}") from error
    return engine
