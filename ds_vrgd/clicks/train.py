"""The DLRM run: updates, checkpoints, evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed.comm as dist
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from ds_vrgd.clicks.evaluation import Scores, held_out_scores
from ds_vrgd.clicks.model import DLRM
from ds_vrgd.clicks.prepare import prepare
from ds_vrgd.clicks.prepared import Batch, PreparedClicks, open_prepared, verify_prepared
from ds_vrgd.clicks.runfile import RunFile
from ds_vrgd.clicks.stream import TrainingOrder, evaluation_batches, training_batches
from ds_vrgd.training import checkpoint
from ds_vrgd.training.errors import InputError, Interrupted, require_finite
from ds_vrgd.training.files import write_binary
from ds_vrgd.training.launch import fill_deepspeed_config
from ds_vrgd.training.log import RunLog
from ds_vrgd.training.output import finish, whole_state
from ds_vrgd.training.preemption import StopRequest
from ds_vrgd.training.ranks import Ranks
from ds_vrgd.training.start import begin

#: What the monitors get of an update's record.
MONITORED = ("loss", "lr", "rows_per_second")


@dataclass(frozen=True)
class Training:
    """Everything that one rank's training loop uses."""

    run: RunFile
    data: PreparedClicks
    steps: int
    engine: Any
    ranks: Ranks
    stop: StopRequest
    output: Path
    description: dict[str, Any]
    log: RunLog | None  # on rank 0

    def train(self, first_step: int) -> Scores | None:
        """Train from update ``first_step`` to the end. Collective.

        Returns:
            The evaluation at the end; None if nothing was left to train.

        Raises:
            TrainingFailed: the loss is not finite, or a checkpoint cannot be written.
            Interrupted: a rank was asked to stop; all have saved.
        """
        run, scores = self.run, None
        order = TrainingOrder(self.data.train, run.seed)
        steps = range(first_step, self.steps)
        batches = training_batches(order, run.micro_batch, run.global_batch, steps, self.ranks.rank, self.ranks.size)
        bar = tqdm(total=self.steps, initial=first_step, disable=self.log is None, dynamic_ncols=True)
        for step in steps:
            started = time.perf_counter()
            done, lr = step + 1, run.lr_at(step, self.steps)
            loss, stop = self.update(batches, lr)
            self.check(loss, done)
            speed = run.global_batch / (time.perf_counter() - started)
            if self.log is not None:
                record = {
                    "step": done,
                    "loss": loss,
                    "lr": lr,
                    "rows_per_second": speed,
                    "skipped": bool(getattr(self.engine.optimizer, "overflow", False)),
                }
                self.log.made(record, self.engine, self.steps)
            bar.set_postfix(loss=f"{loss:.4f}", lr=f"{lr:.2e}", rows_s=f"{speed:.0f}", refresh=False)
            bar.update()
            if stop or done == self.steps or done % run.checkpoint_every == 0:
                scores = self.evaluate(done)
                # Weights that the last update has ruined never become the newest checkpoint.
                self.check(scores.loss, done)
                checkpoint.save(self.engine, self.ranks, self.output, done, self.description, run.keep_checkpoints)
            if stop and done < self.steps:
                bar.close()
                raise Interrupted(done, self.output)
        bar.close()
        return scores

    def update(self, batches: Iterator[Tensor], lr: float) -> tuple[float, bool]:
        """One optimizer step over the global batch. Collective.

        Returns:
            (loss, stop): the mean over the rows of all ranks, and whether any rank has been asked to stop.
        """
        engine = self.engine
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        accumulation = engine.gradient_accumulation_steps()
        total = torch.zeros((), dtype=torch.float64, device=engine.device)
        for turn in range(accumulation):
            batch = Batch.of(next(batches).to(engine.device, non_blocking=True))
            engine.set_gradient_accumulation_boundary(turn == accumulation - 1)
            loss = binary_cross_entropy_with_logits(engine(batch.dense, batch.categories), batch.labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        # The ranks agree here whether to stop; asking costs no collective of its own.
        sums = torch.stack([total / (accumulation * self.ranks.size), total.new_tensor(float(self.stop.requested))])
        dist.all_reduce(sums)
        mean, stops = sums.tolist()
        return mean, stops > 0

    def check(self, loss: float, step: int) -> None:
        """Stop a run that has come apart. The loss is that of all ranks, so every rank stops.

        Raises:
            TrainingFailed: the loss is NaN or infinite.
        """
        way_out = f"and go on from the last checkpoint with --resume {self.output}"
        require_finite([loss], step, f"lower lr or lengthen the warm-up, {way_out}")

    def evaluate(self, step: int) -> Scores:
        """Score the test set. Collective."""
        rows = min(self.run.evaluation_rows or len(self.data.test), len(self.data.test))
        batches = evaluation_batches(self.data.test, rows, self.run.micro_batch, self.ranks.rank, self.ranks.size)
        scores = held_out_scores(self.engine, batches)
        if self.log is not None:
            values = {f"held_out_{name}": value for name, value in asdict(scores).items()}
            self.log.evaluation(step, values)
        return scores


def train(run: RunFile, deepspeed_config: dict[str, Any], output: Path, resume: Path | Literal["auto"] | None) -> str:
    """Run (or go on with) a DLRM run, see ``start.begin``. Collective; torch.distributed is initialised.

    Returns:
        The line that sums the run up.

    Raises:
        InputError: something that the user gave cannot be used; nothing was trained or overwritten.
        PreparationFailed: the data cannot be written.
        TrainingFailed: the run came apart, or a checkpoint could not be written.
        Interrupted: SIGTERM came, and all ranks have saved.
    """
    start = begin(run, output, resume)
    if start.finished is not None:
        return start.finished
    ranks = start.ranks
    config = ranks.on_rank_zero(lambda: fill_deepspeed_config(deepspeed_config, [run.batches], 0, ranks.size, output))

    folder = run.prepared_data or output / "data"
    ranks.on_rank_zero(lambda: prepare(run.data, folder, report=lambda text: tqdm.write(f"data: {text}")))
    verify_prepared(folder, ranks)
    data = open_prepared(folder)
    steps = ranks.on_rank_zero(lambda: _steps(run, data))
    description = _describe(run, data, steps, ranks.size, config)
    start.check(description)

    torch.manual_seed(run.seed)
    model = DLRM(data.table_sizes, run.model.embedding_dim, run.model.bottom_mlp, run.model.top_mlp)
    engine = start.engine(model, model.parameters(), config)
    log = RunLog(output, start.step, engine.monitor, MONITORED) if ranks.rank == 0 else None
    with StopRequest() as stop:
        training = Training(run, data, steps, engine, ranks, stop, output, description, log)
        scores = training.train(start.step) or training.evaluate(steps)
    state = whole_state(engine, engine.module)
    line = f"held-out AUC {scores.auc:.4f}, log loss {scores.loss:.4f} (of the click rate alone {scores.base_loss:.4f})"
    if ranks.rank == 0:
        write_binary(output / "model.pt", lambda file: torch.save(state, file))
        finish(run, output, line)
    return line


def _steps(run: RunFile, data: PreparedClicks) -> int:
    """Updates of the run.

    Raises:
        InputError: an epoch is smaller than a batch, so that an update would see a row twice.
    """
    rows = TrainingOrder(data.train, run.seed).epoch_rows
    if rows < run.global_batch:
        raise InputError(
            f"global_batch={run.global_batch}, but an epoch has {rows:,} rows, and one update must not see a row "
            "twice; lower global_batch or give more data"
        )
    steps = int(run.epochs * rows / run.global_batch)
    if not steps:
        raise InputError(f"epochs={run.epochs} of {rows:,} rows is less than one global_batch={run.global_batch}")
    return steps


def _describe(
    run: RunFile, data: PreparedClicks, steps: int, ranks: int, deepspeed_config: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must agree on."""
    schedule = ("lr", "warmup_ratio", "decay_from", "decay_power", "epochs", "global_batch", "micro_batch")
    return {
        "model": run.model.model_dump(),
        "data_sha256": data.sha256,
        "seed": run.seed,
        "phases": [{name: getattr(run, name) for name in schedule} | {"steps": steps}],
        "ranks": ranks,
        "zero_stage": deepspeed_config.get("zero_optimization", {}).get("stage", 0),
        "optimizer": deepspeed_config["optimizer"]["type"],
    }
