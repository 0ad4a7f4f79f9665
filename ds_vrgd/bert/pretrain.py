"""The pre-training run: phases, updates, checkpoints, evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed.comm as dist
import numpy as np
import torch
from tqdm import tqdm

from ds_vrgd.bert.evaluation import held_out_losses
from ds_vrgd.bert.examples import Batch, ExampleBuilder, SpecialIds
from ds_vrgd.bert.model import PretrainingModel, bert_config
from ds_vrgd.bert.prepare import prepare
from ds_vrgd.bert.prepared import PreparedData, open_prepared, verify_prepared
from ds_vrgd.bert.runfile import RunFile
from ds_vrgd.bert.saving import describe, save_model
from ds_vrgd.bert.stream import MicroBatches, RankOrder, evaluation_batches, training_batches
from ds_vrgd.schedules import phase_of_step
from ds_vrgd.training import checkpoint
from ds_vrgd.training.errors import Interrupted, TrainingFailed, require_finite
from ds_vrgd.training.groups import parameter_groups
from ds_vrgd.training.launch import fill_deepspeed_config
from ds_vrgd.training.log import RunLog
from ds_vrgd.training.output import finish
from ds_vrgd.training.plot import plot
from ds_vrgd.training.preemption import StopRequest
from ds_vrgd.training.ranks import Ranks
from ds_vrgd.training.start import begin
from ds_vrgd.zero import set_batch_sizes

_DROPOUT = 3  # first entry of a seed, beside those of ds_vrgd.bert.stream
# What the monitors get of an update's record.
_MONITORED = ("loss", "masked_lm_loss", "next_sentence_loss", "lr", "sequences_per_second")
_MOST_SKIPPED_UPDATES = 50  # in a row; fp16 from a scale of 2**32 needs about 30


@dataclass(frozen=True)
class Training:
    """Everything that one rank's training loop uses."""

    run: RunFile
    data: PreparedData
    engine: Any
    ranks: Ranks
    stop: StopRequest
    output: Path
    description: dict[str, Any]
    log: RunLog | None  # on rank 0

    def builder(self, split: str, sequence_length: int) -> ExampleBuilder:
        """Examples of one length from the split ``train`` or ``held_out``."""
        documents = self.data.train if split == "train" else self.data.held_out
        ids = SpecialIds.of(self.data.tokenizer)
        return ExampleBuilder(documents, self.data.chunks[split, sequence_length], sequence_length, ids)

    def phase(self, index: int, first_step: int) -> tuple[float, float]:
        """Train phase ``index`` from its update ``first_step`` to its end. Collective.

        Returns:
            The evaluation at its end, see ``evaluate``.

        Raises:
            TrainingFailed: see ``check`` and ``checkpoint.save``.
            Interrupted: a rank was asked to stop; all have saved.
        """
        phase = self.run.phases[index]
        done = sum(self.run.phase_steps[:index])
        set_batch_sizes(self.engine, phase.micro_batch, phase.global_batch)
        micro_batches = MicroBatches(self.builder("train", phase.sequence_length), self.run.seed, index, phase)
        order = RankOrder(phase, first_step, dist.get_rank(), dist.get_world_size())
        pinned = self.engine.device.type == "cuda"
        batches = training_batches(micro_batches, order, self.run.loader_workers, pinned=pinned)
        skipped = 0
        evaluation = (math.nan, math.nan)
        bar = tqdm(
            total=phase.steps,
            initial=first_step,
            desc=f"phase {index + 1}/{len(self.run.phases)}, sequence {phase.sequence_length}",
            disable=self.log is None,
            dynamic_ncols=True,
        )
        for step in range(first_step, phase.steps):
            started = time.perf_counter()
            total, lr = done + step + 1, phase.lr_at(step)
            *losses, stop = self.update(batches, index, step, lr)
            skipped = skipped + 1 if getattr(self.engine.optimizer, "overflow", False) else 0
            self.check(losses, total, skipped)
            speed = phase.global_batch / (time.perf_counter() - started)
            if self.log is not None:
                record = {
                    "step": total,
                    "phase": index + 1,
                    "loss": sum(losses),
                    "masked_lm_loss": losses[0],
                    "next_sentence_loss": losses[1],
                    "lr": lr,
                    "sequences_per_second": speed,
                    "skipped": skipped > 0,
                }
                self.log.made(record, self.engine, sum(self.run.phase_steps))
            bar.set_postfix(loss=f"{sum(losses):.3f}", lr=f"{lr:.2e}", seq_s=f"{speed:.0f}", refresh=False)
            bar.update()
            if stop or step + 1 == phase.steps or total % self.run.checkpoint_every == 0:
                evaluation = self.evaluate(index, total)
                # Weights that the last update has ruined never become the newest checkpoint.
                self.check(evaluation, total, skipped)
                keep = self.run.keep_checkpoints
                checkpoint.save(self.engine, self.ranks, self.output, total, self.description, keep)
            if stop and total < sum(self.run.phase_steps):
                bar.close()
                raise Interrupted(total, self.output)
        bar.close()
        return evaluation

    def update(self, batches: Iterator[Batch], phase_index: int, step: int, lr: float) -> tuple[float, float, bool]:
        """One optimizer step over the global batch. Collective.

        Returns:
            (masked-LM loss, next-sentence loss, stop): means over the micro-batches of all ranks, and whether any rank
            has been asked to stop. The same on every rank.
        """
        engine = self.engine
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        accumulation, ranks = engine.gradient_accumulation_steps(), dist.get_world_size()
        longest = self.run.phases[phase_index].sequence_length
        losses = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for turn in range(accumulation):
            batch = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in next(batches).items()}
            # Dropout depends on the place in the global batch alone, as the data does.
            place = turn * ranks + dist.get_rank()
            torch.manual_seed(_seed(_DROPOUT, self.run.seed, phase_index, step, place))
            engine.set_gradient_accumulation_boundary(turn == accumulation - 1)
            masked_lm, next_sentence = engine(**batch, longest=longest)
            engine.backward(masked_lm + next_sentence)
            engine.step()
            losses += torch.stack([masked_lm.detach(), next_sentence.detach()])
        # The ranks agree here whether to stop; asking costs no collective of its own.
        sums = torch.cat([losses / (accumulation * ranks), losses.new_tensor([self.stop.requested])])
        dist.all_reduce(sums)
        masked_lm_mean, next_sentence_mean, stops = sums.tolist()
        return masked_lm_mean, next_sentence_mean, stops > 0

    def check(self, losses: Sequence[float], step: int, skipped: int) -> None:
        """Stop a run that has come apart. The losses are those of all ranks, so every rank stops.

        Raises:
            TrainingFailed: a loss is NaN or infinite, or too many updates in a row were skipped.
        """
        way_out = f"and go on from the last checkpoint with --resume {self.output}"
        require_finite(losses, step, f"lower lr or lengthen the warm-up of this phase, {way_out}")
        if skipped > _MOST_SKIPPED_UPDATES:
            raise TrainingFailed(
                f"update {step}: {skipped} updates in a row were skipped because gradients overflowed; use bf16 "
                "instead of fp16, or lower lr"
            )

    def evaluate(self, index: int, step: int) -> tuple[float, float]:
        """Held-out (masked-LM loss, unigram entropy) at the length of phase ``index``. Collective."""
        phase = self.run.phases[index]
        batches = evaluation_batches(
            self.builder("held_out", phase.sequence_length),
            self.run.evaluation_sequences,
            phase.micro_batch,
            dist.get_rank(),
            dist.get_world_size(),
        )
        loss, entropy = held_out_losses(self.engine, batches, phase.sequence_length, self.data.unigram_counts)
        if self.log is not None:
            self.log.evaluation(step, {"held_out_masked_lm_loss": loss, "unigram_entropy": entropy})
        return loss, entropy


def pretrain(
    run: RunFile, deepspeed_config: dict[str, Any], output: Path, resume: Path | Literal["auto"] | None
) -> str:
    """Run (or go on with) a pre-training run, see ``start.begin``. Collective; torch.distributed is initialised.

    Returns:
        The line that sums the run up.

    Raises:
        InputError: something that the user gave cannot be used; nothing was trained or overwritten.
        TrainingFailed: the run came apart, or a checkpoint could not be written.
        Interrupted: SIGTERM came, and all ranks have saved.
    """
    start = begin(run, output, resume)
    if start.finished is not None:
        return start.finished
    ranks = start.ranks
    phase_index, phase_step = phase_of_step(start.step, run.phase_steps)
    first = min(phase_index, len(run.phases) - 1)
    config = ranks.on_rank_zero(lambda: fill_deepspeed_config(deepspeed_config, run.batches, first, ranks.size, output))

    data_folder = run.prepared_data or output / "data"
    ranks.on_rank_zero(lambda: _prepare(run, data_folder))
    verify_prepared(run, data_folder, ranks)
    data = open_prepared(run, data_folder)
    description = describe(run, data.vocabulary_sha256, data.sha256, ranks.size, config)
    start.check(description)

    torch.manual_seed(_seed(run.seed))
    config_of_model = bert_config(run.model, len(data.tokenizer))
    model = PretrainingModel(config_of_model, activation_checkpointing=run.activation_checkpointing)
    if run.compile:
        model.compile_layers()
    engine = start.engine(model, parameter_groups(model), config)
    log = RunLog(output, start.step, engine.monitor, _MONITORED) if dist.get_rank() == 0 else None
    evaluation = None
    with StopRequest() as stop:
        training = Training(run, data, engine, ranks, stop, output, description, log)
        for index in range(phase_index, len(run.phases)):
            evaluation = training.phase(index, phase_step if index == phase_index else 0)
    # Nothing was left to train if an interrupted run had saved its last checkpoint.
    loss, entropy = evaluation or training.evaluate(len(run.phases) - 1, sum(run.phase_steps))
    save_model(engine, data.tokenizer, output)
    line = f"held-out mlm loss {loss:.4f} (unigram entropy {entropy:.4f})"
    if dist.get_rank() == 0:
        plot(output)
        finish(run, output, line)
    return line


def _prepare(run: RunFile, folder: Path) -> None:
    prepare(run.data_settings, run.sequence_lengths, folder, report=lambda text: tqdm.write(f"data: {text}"))


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
