"""The training loop. A task gives batches, a loss and an evaluation; everything else of a run is here, once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import deepspeed.comm as dist
import torch
from torch import Tensor

from ds_vrgd.schedules import phase_of_step
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.engine import set_batch_sizes
from ds_vrgd_recipes.run.errors import Interrupted, TrainingFailed
from ds_vrgd_recipes.run.groups import GROUP_OPTIONS, parameter_groups
from ds_vrgd_recipes.run.launch import fill_deepspeed_config
from ds_vrgd_recipes.run.log import RunLog
from ds_vrgd_recipes.run.output import check_output, finish
from ds_vrgd_recipes.run.preemption import StopRequest
from ds_vrgd_recipes.run.progress import Progress, peak_memory_gb
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.run.settings import mathematics
from ds_vrgd_recipes.run.start import find_start, open_log, rehearse, start_engine

_MOST_SKIPPED_UPDATES = 50  # in a row; fp16 from a scale of 2**32 needs about 30


class Place(NamedTuple):
    """A micro-batch: the phase and its update, both from 0, and the number of the micro-batch in the global batch."""

    phase: int
    step: int
    micro_batch: int


class Objective(Protocol):
    """The elements of an update: batches, a loss, a learning rate.

    Attributes:
        run: the settings, with the batch sizes of every phase in ``batches``.
        phases: updates of each phase.
        values: names of the means that ``loss`` returns. Those that end in "loss" add up to the loss of the update.
        unit: what a batch counts, such as "sequences".
        way_out: what to do when the loss is not finite; "{output}" stands for the output folder.
    """

    run: Any
    values: tuple[str, ...]
    unit: str
    way_out: str
    phases: Sequence[int] = ()

    def title(self, phase: int) -> str | None:
        """Return the name of a phase for the progress bar."""
        return None

    def tokens(self, phase: int) -> int | None:
        """Return the tokens of one ``unit`` of a phase; None where there are no tokens."""
        return None

    def batches(self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device) -> Iterator[Any]:
        """Yield this rank's micro-batches of a phase, from its update ``first_step`` on."""

    def lr(self, phase: int, step: int) -> float:
        """Return the learning rate of an update of a phase (0-based)."""

    def loss(self, engine: Any, batch: Any, place: Place) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss to differentiate, and ``values``, of one micro-batch."""

    def where(self, phase: int, step: int) -> dict[str, float]:
        """Return what else the log has of the run's update ``step`` (from 1), such as its epoch."""
        return {}


class Task(Objective, Protocol):
    """A training from its run file to its result. The methods stand in the order in which the loop calls them.

    Attributes:
        phases: known once ``open`` has returned, and earlier where there are several.
        group_options: options of the param groups that ``groups`` makes.
        prepares: whether ``open`` may take hours, so that the engine is rehearsed before.
    """

    group_options: Sequence[Mapping[str, Any]] = GROUP_OPTIONS
    prepares: bool = True

    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return what a resumed run must agree on, as far as it is known without data and is not in ``mathematics``."""

    def check_data(self, folder: Path) -> None:
        """Check, without reading the data, that they can be opened in ``folder``, or prepared there.

        Raises:
            InputError: they cannot.
        """

    def open(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        """Prepare and open the data, in ``folder`` by default; return what a resumed run must agree on. Collective."""

    def network(self) -> torch.nn.Module:
        """Return the network with weights from the run's seed."""

    def groups(self, model: torch.nn.Module) -> Iterable[Any]:
        """Return the param groups of a network."""
        return parameter_groups(model)

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after ``step`` updates. The loop always does before it saves."""
        return False

    def saves(self, step: int) -> bool:
        """Return whether to save after ``step`` updates. The loop always does at the end of a phase."""
        return bool(step % self.run.checkpoint_every == 0)

    def evaluate(self, engine: Any, phase: int) -> dict[str, float]:
        """Return the held-out numbers by the names of the log. Collective."""

    def summary(self, evaluation: dict[str, float]) -> str:
        """Return the line that sums the run up."""

    def finish(self, engine: Any, output: Path) -> None:
        """Save what the run leaves. Collective."""


@dataclass(kw_only=True)
class Updates:
    """One rank's updates.

    Attributes:
        engine: DeepSpeed's, or another object with the methods of its that :meth:`update` calls.
        output: the folder of the run.
        silent: whether to show no progress.
    """

    task: Objective
    engine: Any
    output: Path = Path()
    stop: StopRequest = field(default_factory=StopRequest)
    silent: bool = False
    _progress: Progress | None = None

    def all(self, phase: int, first_step: int = 0) -> Iterator[tuple[dict[str, Any], bool]]:
        """Make the updates of a phase from ``first_step`` on; yield each one's record, and whether a rank must stop.

        Raises:
            TrainingFailed: a loss is not finite, or too many updates in a row are skipped.
        """
        task, steps, before, skipped = self.task, self.task.phases[phase], sum(self.task.phases[:phase]), 0
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        batches = task.batches(phase, first_step, rank, ranks, self.engine.device)
        if self._progress is None:
            work = [task.run.batches[i].global_batch * (task.tokens(i) or 1) for i in range(len(task.phases))]
            self._progress = Progress(task.phases, work, silent=self.silent)
        tokens = task.tokens(phase)
        with self._progress.phase(phase, task.title(phase), first_step):
            for step in range(first_step, steps):
                started, done = time.perf_counter(), before + step + 1
                means, stops = self.update(batches, phase, step)
                skipped = skipped + 1 if getattr(self.engine.optimizer, "overflow", False) else 0
                if skipped > _MOST_SKIPPED_UPDATES:
                    raise TrainingFailed(
                        f"update {done}: {skipped} updates in a row were skipped because gradients overflowed or were "
                        "NaN; lower lr, or use bf16 instead of fp16"
                    )
                loss, lr = self.check(means, done), task.lr(phase, step)
                batch, seconds = task.run.batches[phase].global_batch, time.perf_counter() - started
                record = {"step": done, **task.where(phase, done), "loss": loss, **means, "lr": lr}
                counts = {task.unit: batch} | ({} if tokens is None else {"tokens": batch * tokens})
                record |= {f"{name}_per_second": count / seconds for name, count in counts.items()}
                record |= {"memory_gb": round(peak_memory_gb(self.engine.device), 3), "skipped": skipped > 0}
                shown = {"loss": f"{loss:.4g}", "lr": f"{lr:.2e}", "memory": f"{record['memory_gb']:.1f} GB"}
                self._progress.made(shown, counts, seconds)
                yield record, stops

    def update(self, batches: Iterator[Any], phase: int, step: int) -> tuple[dict[str, float], bool]:
        """Make one optimizer step over the global batch. Collective.

        Returns:
            The task's values, means over the micro-batches of all ranks, and whether any rank has been asked to stop.
            The same on every rank.
        """
        engine, names = self.engine, self.task.values
        for group in engine.optimizer.param_groups:
            group["lr"] = self.task.lr(phase, step)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        accumulation = engine.gradient_accumulation_steps()
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=engine.device)
        for turn in range(accumulation):
            engine.set_gradient_accumulation_boundary(turn == accumulation - 1)
            loss, values = self.task.loss(engine, next(batches), Place(phase, step, turn * ranks + rank))
            engine.backward(loss)
            engine.step()
            sums[:-1] += torch.stack([value.detach() for value in values])
        sums /= accumulation * ranks
        sums[-1] = float(self.stop.requested)  # the ranks agree here whether to stop, without a collective of its own
        if ranks > 1:
            dist.all_reduce(sums)
        *means, stops = sums.tolist()
        return dict(zip(names, means, strict=True)), stops > 0

    def check(self, values: Mapping[str, float], step: int) -> float:
        """Return the sum of the losses among ``values``, which are those of all ranks, so that every rank stops.

        Raises:
            TrainingFailed: it is NaN or infinite.
        """
        loss = sum(value for name, value in values.items() if name.endswith("loss"))
        if not math.isfinite(loss):
            raise TrainingFailed(f"update {step}: the loss is {loss}; {self.task.way_out.format(output=self.output)}")
        return loss


@dataclass(kw_only=True)
class Training(Updates):
    """One rank's updates, evaluations and checkpoints.

    Attributes:
        description: of the run, for its checkpoints; see ``checkpoint.check``.
        log: on rank 0.
    """

    task: Task
    ranks: Ranks
    description: dict[str, Any]
    log: RunLog | None

    def phase(self, phase: int, first_step: int) -> dict[str, float]:
        """Train a phase from its update ``first_step`` to its end, and return the evaluation there. Collective.

        Raises:
            TrainingFailed: a loss is not finite, too many updates are skipped, or a checkpoint cannot be written.
            Interrupted: a rank was asked to stop; all have saved.
        """
        run, last, evaluation = self.task.run, sum(self.task.phases[: phase + 1]), {}
        set_batch_sizes(self.engine, run.batches[phase].micro_batch, run.batches[phase].global_batch)
        for record, stops in self.all(phase, first_step):
            step = record["step"]
            if self.log is not None:
                self.log.made(record, self.engine, sum(self.task.phases))
            saves = stops or step == last or self.task.saves(step)
            if saves or self.task.evaluates(step):
                evaluation = self.evaluate(phase, step)
            if saves:  # never weights that the last update has ruined: they have been evaluated
                checkpoint.save(self.engine, self.ranks, self.output, step, self.description, run.keep_checkpoints)
            if stops and step < sum(self.task.phases):
                raise Interrupted(step, self.output)
        return evaluation

    def evaluate(self, phase: int, step: int) -> dict[str, float]:
        """Evaluate after ``step`` updates, which are in ``phase``, and log it. Collective.

        Raises:
            TrainingFailed: a held-out loss is not finite.
        """
        values = self.task.evaluate(self.engine, phase)
        if self.log is not None:
            self.log.evaluation(step, values)
        self.check(values, step)
        return values


class PlainEngine:
    """An optimizer in one process, with the methods of DeepSpeed's engine that :meth:`Training.update` calls.

    Args:
        model: is on the device to train on.
        accumulation: micro-batches per update; their mean is stepped on.
        clipping: largest norm of a gradient.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, accumulation: int, clipping: float
    ) -> None:
        self.module, self.optimizer = model, optimizer
        self.device = next(model.parameters()).device
        self._accumulation, self._clipping, self._at_boundary = accumulation, clipping, False

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per update."""
        return self._accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Announce whether the next micro-batch is the last one of its update."""
        self._at_boundary = is_boundary

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call the model."""
        return self.module(*inputs, **named)

    def backward(self, loss: Tensor) -> None:
        """Add the micro-batch's share of the gradient."""
        (loss * (1 / self._accumulation)).backward()

    def step(self) -> None:
        """Make the update, after its last micro-batch."""
        if self._at_boundary:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clipping)
            self.optimizer.step()
            self.optimizer.zero_grad()


def describe(task: Task, config: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return what two runs of one run file must agree on to be the same."""
    return task.describe(dict(config)) | mathematics(config, ranks.size, task.group_options)


def train(task: Task, deepspeed_config: dict[str, Any], output: Path, resume: Path | Literal["auto"] | None) -> str:
    """Run or resume a training. Collective; torch.distributed is initialised.

    Args:
        deepspeed_config: of ``load_deepspeed_config``.
        output: folder to write into.
        resume: see ``find_start``.

    Returns:
        The line that sums the run up.

    Raises:
        InputError: something that the user gave cannot be used; nothing was trained or overwritten.
        PreparationFailed: the data cannot be written.
        TrainingFailed: the run came apart, or a checkpoint could not be written.
        Interrupted: SIGTERM came, and all ranks have saved.
    """
    run, ranks = task.run, Ranks()
    settings = ranks.on_rank_zero(lambda: describe(task, deepspeed_config, ranks))
    if (finished := ranks.on_rank_zero(lambda: check_output(run, settings, output, resume))) is not None:
        return finished
    found = find_start(ranks, output, resume)
    done = found.step if found else 0
    first = min(phase_of_step(done, list(task.phases))[0], len(run.batches) - 1) if len(run.batches) > 1 else 0
    config = ranks.on_rank_zero(
        lambda: fill_deepspeed_config(deepspeed_config, run.batches, first, ranks.size, output, task.group_options)
    )
    description = describe(task, config, ranks)

    def check() -> None:
        if found:
            ranks.on_rank_zero(lambda: checkpoint.check(found, description))

    check()
    folder = getattr(run, "prepared_data", None) or output / "data"
    if task.prepares and not ranks.on_rank_zero(folder.exists):
        rehearse(config, task.groups)
    description |= task.open(ranks, folder)
    check()

    model = task.network()
    engine = start_engine(ranks, output, found, model, task.groups(model), config)
    monitored = dict.fromkeys(["loss", *task.values, "lr", f"{task.unit}_per_second", "memory_gb"])
    log = open_log(ranks, output, done, engine, list(monitored))
    evaluation: dict[str, float] = {}
    with StopRequest() as stop:
        training = Training(
            task=task,
            engine=engine,
            output=output,
            stop=stop,
            silent=log is None,
            ranks=ranks,
            description=description,
            log=log,
        )
        begun, step = phase_of_step(done, list(task.phases))
        for phase in range(begun, len(task.phases)):
            evaluation = training.phase(phase, step if phase == begun else 0)
    # Nothing was left to train if an interrupted run had saved its last checkpoint.
    line = task.summary(evaluation or training.evaluate(len(task.phases) - 1, done))
    task.finish(engine, output)
    if ranks.rank == 0:
        finish(run, settings, output, line)
    return line
