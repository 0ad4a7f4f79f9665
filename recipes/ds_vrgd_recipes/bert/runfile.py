"""The run file: one YAML page that describes a pre-training run, except for the optimizer (DeepSpeed JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.bert.sources import (
    DEFAULT_DEDUPLICATE_FROM,
    DEFAULT_HELD_OUT_EVERY,
    Corpora,
    DataSettings,
    DeduplicateFrom,
    HeldOutEvery,
    VocabularySection,
)
from ds_vrgd_recipes.run.launch import Batches
from ds_vrgd_recipes.run.runfile import Section, describe, read_run_file


class ModelSection(Section):
    """Shape of the network, under the names of ``transformers.BertConfig``; the vocabulary sets its own size."""

    num_hidden_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    max_position_embeddings: int = Field(default=512, gt=0)
    hidden_dropout_prob: float = Field(default=0.1, ge=0, lt=1)
    attention_probs_dropout_prob: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelSection:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}; change one of them"
            )
        return self


class Phase(Section):
    """One phase: a sequence length, a global batch and a schedule that starts from zero.

    ``global_batch`` and ``micro_batch`` count sequences. ``micro_batch`` is per rank and one backward pass; the
    ranks and the gradient accumulation share ``global_batch`` out.
    """

    sequence_length: int = Field(ge=8)
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    steps: int = Field(gt=0)
    lr: float = Field(gt=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    decay_power: float = Field(default=1.0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Phase:
        if (self.warmup_ratio is None) == (self.warmup_steps is None):
            raise ValueError(
                f"warmup_ratio={self.warmup_ratio} and warmup_steps={self.warmup_steps}: give exactly one of them"
            )
        if self.warmup_steps is not None and self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than steps={self.steps}; lower it")
        return self

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the phase's update ``step`` (0-based)."""
        warmup = self.warmup_steps
        if warmup is None:
            warmup = round((self.warmup_ratio or 0.0) * self.steps)
        return warmup_polynomial_lr(
            step, total_steps=self.steps, peak_lr=self.lr, warmup_steps=warmup, power=self.decay_power
        )

    def accumulation_steps(self, ranks: int) -> int:
        """Return the micro-batches per rank and update.

        Raises:
            InputError: the global batch cannot be shared out evenly.
        """
        return Batches(self.global_batch, self.micro_batch).accumulation_steps(ranks)


class RunFile(Section):
    """A whole run: data, network and phases."""

    seed: int = Field(default=1, ge=0)
    model: ModelSection
    corpus: Corpora | None = None
    """The source of the data; corpus and vocabulary may be left out together where prepared_data is ready to use."""
    vocabulary: VocabularySection | None = None
    prepared_data: Path | None = None
    """Tokens ready to train on; shared by every run that names the same folder. Default: inside the output."""
    held_out_every: HeldOutEvery = DEFAULT_HELD_OUT_EVERY
    deduplicate_from: DeduplicateFrom = DEFAULT_DEDUPLICATE_FROM
    activation_checkpointing: bool = False
    """Keep only each layer's input, and compute the layer once more in the backward pass."""
    compile: bool = False
    """Compile the network layer by layer, which takes about a minute at the first updates. Needs a C++ compiler."""
    evaluation_sequences: int = Field(default=1024, gt=0)
    """At most this many held-out sequences are evaluated."""
    checkpoint_every: int = Field(gt=0)
    """Updates between checkpoints, in addition to the one at the end of each phase."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Complete checkpoints that stay; older ones are deleted when a new one is complete."""
    loader_workers: int = Field(default=0, ge=0)
    """Processes per rank that build batches ahead of the update; 0 builds them in the training process."""
    phases: list[Phase] = Field(min_length=1)

    @model_validator(mode="after")
    def _positions_suffice(self) -> RunFile:
        for number, phase in enumerate(self.phases, start=1):
            if phase.sequence_length > self.model.max_position_embeddings:
                raise ValueError(
                    f"phase {number} has sequence_length={phase.sequence_length}, longer than the position table, "
                    f"max_position_embeddings={self.model.max_position_embeddings}; shorten the sequence or "
                    "enlarge the table (a table cannot grow between phases)"
                )
        return self

    @model_validator(mode="after")
    def _data_is_known(self) -> RunFile:
        if (self.corpus is None) != (self.vocabulary is None):
            missing = "corpus" if self.corpus is None else "vocabulary"
            raise ValueError(f"{missing}: missing; give corpus and vocabulary together, or prepared_data alone")
        if self.corpus is None and self.prepared_data is None:
            raise ValueError("corpus: missing; give corpus and vocabulary, or prepared_data, a folder that is ready")
        if self.corpus is None and (given := {"held_out_every", "deduplicate_from"} & self.model_fields_set):
            raise ValueError(
                f"{', '.join(sorted(given))}: prepared_data={self.prepared_data} was prepared with a value of its own; "
                "remove the key, or give corpus and vocabulary, too"
            )
        return self

    @property
    def data_settings(self) -> DataSettings | None:
        """The settings of the data; None: use ``prepared_data`` as it is."""
        if self.corpus is None or self.vocabulary is None:
            return None
        return DataSettings(
            corpus=self.corpus,
            vocabulary=self.vocabulary,
            held_out_every=self.held_out_every,
            deduplicate_from=self.deduplicate_from,
        )

    @property
    def sequence_lengths(self) -> list[int]:
        """Lengths of all phases, each once, ascending."""
        return sorted({phase.sequence_length for phase in self.phases})

    @property
    def batches(self) -> list[Batches]:
        """Batch sizes of each phase."""
        return [
            Batches(phase.global_batch, phase.micro_batch, f"phase {number}")
            for number, phase in enumerate(self.phases, start=1)
        ]

    @property
    def phase_steps(self) -> list[int]:
        """Updates of each phase."""
        return [phase.steps for phase in self.phases]


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read and check a run file. Relative paths in it are relative to the working directory.

    Args:
        overrides: values that replace those of the file: ``KEY=VALUE``.

    Raises:
        InputError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    return read_run_file(path, RunFile, "configs/demo.yaml", describe_error, overrides=overrides)


def describe_error(problem: Any) -> str:
    """Return one line for a pydantic error: key, value, and what to do."""
    location = list(problem["loc"])
    if location[:1] == ["corpus"]:
        del location[2:3]  # the kind of corpus, which pydantic inserts and the file does not hold
        if location[1:] and location[1] == 0:
            del location[1]  # the first one of a list, or the only one
    return describe({**problem, "loc": location})
