"""The pre-training of BERT as a task of the training loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import BertTokenizerFast
from typing_extensions import override

from ds_vrgd_recipes.bert.card import write_card
from ds_vrgd_recipes.bert.corpus import source_files
from ds_vrgd_recipes.bert.evaluation import held_out_losses
from ds_vrgd_recipes.bert.examples import Batch, ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.model import PretrainingModel, bert_config
from ds_vrgd_recipes.bert.prepare import check_folder, prepare
from ds_vrgd_recipes.bert.prepared import open_prepared, verify_prepared
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.bert.stream import MicroBatches, RankOrder, evaluation_batches, training_batches
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.loop import Place, Task
from ds_vrgd_recipes.run.output import whole_state
from ds_vrgd_recipes.run.plot import plot
from ds_vrgd_recipes.run.ranks import Ranks

_DROPOUT = 3  # first entry of a seed; ds_vrgd_recipes.bert.stream has the others


class Pretraining(Task):
    """Masked words and next sentences, in phases."""

    values = ("masked_lm_loss", "next_sentence_loss")
    unit = "sequences"
    way_out = (
        "lower lr or lengthen the warm-up of this phase, and resume from the last checkpoint with --resume {output}"
    )

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.phases = run.phase_steps

    @override
    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        phases = [phase.model_dump() for phase in self.run.phases]
        return {"model": self.run.model.model_dump(), "seed": self.run.seed, "phases": phases}

    @override
    def check_data(self, folder: Path) -> None:
        settings = self.run.data_settings
        if not check_folder(settings, folder) and settings is not None:
            source_files(settings.corpus)

    @override
    def open(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        run = self.run
        ranks.on_rank_zero(
            lambda: prepare(run.data_settings, run.sequence_lengths, folder, lambda text: tqdm.write(f"data: {text}"))
        )
        verify_prepared(run, folder, ranks)
        self.folder = folder
        self.data = open_prepared(run, folder)
        return {"vocabulary_sha256": self.data.vocabulary_sha256, "data_sha256": self.data.sha256}

    @override
    def network(self) -> PretrainingModel:
        torch.manual_seed(_seed(self.run.seed))
        config = bert_config(self.run.model, len(self.data.tokenizer))
        model = PretrainingModel(config, activation_checkpointing=self.run.activation_checkpointing)
        if self.run.compile:
            model.compile_layers()
        return model

    @override
    def title(self, phase: int) -> str:
        return f"phase {phase + 1}/{len(self.phases)}, sequence {self.run.phases[phase].sequence_length}"

    @override
    def tokens(self, phase: int) -> int:
        return self.run.phases[phase].sequence_length

    @override
    def batches(self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device) -> Iterator[Batch]:
        settings = self.run.phases[phase]
        micro_batches = MicroBatches(self._builder("train", phase), self.run.seed, phase, settings)
        order = RankOrder(settings, first_step, rank, ranks)
        return training_batches(micro_batches, order, self.run.loader_workers, pinned=device.type == "cuda")

    @override
    def lr(self, phase: int, step: int) -> float:
        return self.run.phases[phase].lr_at(step)

    @override
    def loss(self, engine: Any, batch: Batch, place: Place) -> tuple[Tensor, Sequence[Tensor]]:
        on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
        # Dropout depends on the place in the global batch alone, as the data does.
        torch.manual_seed(_seed(_DROPOUT, self.run.seed, *place))
        masked_lm, next_sentence = engine(**on_device, longest=self.run.phases[place.phase].sequence_length)
        return masked_lm + next_sentence, (masked_lm, next_sentence)

    @override
    def where(self, phase: int, step: int) -> dict[str, float]:
        return {"phase": phase + 1}

    @override
    def evaluate(self, engine: Any, phase: int) -> dict[str, float]:
        settings, rank, ranks = self.run.phases[phase], dist.get_rank(), dist.get_world_size()
        builder, sequences = self._builder("held_out", phase), self.run.evaluation_sequences
        batches = evaluation_batches(builder, sequences, settings.micro_batch, rank, ranks)
        loss, entropy = held_out_losses(engine, batches, settings.sequence_length, self.data.unigram_counts)
        return {"held_out_masked_lm_loss": loss, "unigram_entropy": entropy}

    @override
    def finish(self, engine: Any, output: Path) -> None:
        save_model(engine, self.data.tokenizer, output)
        if engine.global_rank == 0:
            with contextlib.suppress(InputError):  # where no update was left to train in a new output
                write_card(self.run, engine, self.folder, output)
                plot(output)

    @override
    def summary(self, evaluation: dict[str, float]) -> str:
        loss, entropy = evaluation["held_out_masked_lm_loss"], evaluation["unigram_entropy"]
        return f"held-out mlm loss {loss:.4f} (unigram entropy {entropy:.4f})"

    def _builder(self, split: str, phase: int) -> ExampleBuilder:
        documents = self.data.train if split == "train" else self.data.held_out
        length = self.run.phases[phase].sequence_length
        return ExampleBuilder(documents, self.data.chunks[split, length], length, SpecialIds.of(self.data.tokenizer))


def save_model(engine: Any, tokenizer: BertTokenizerFast, output: Path) -> None:
    """Save network and tokenizer for ``from_pretrained`` into ``output/model``, in the training dtype. Collective."""
    network = engine.module.network
    state = whole_state(engine, network)
    if engine.global_rank == 0:
        network.save_pretrained(str(output / "model"), state_dict=state)
        tokenizer.save_pretrained(str(output / "model"))


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
