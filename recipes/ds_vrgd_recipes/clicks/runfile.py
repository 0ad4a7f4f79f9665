"""The run file: one YAML page that describes a DLRM run, except for the optimizer (DeepSpeed JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.clicks.sources import Data
from ds_vrgd_recipes.run.launch import Batches
from ds_vrgd_recipes.run.runfile import Section, describe, read_run_file


class ModelSection(Section):
    """Shape of the network, see ``clicks.model.DLRM``; the data give the number of rows of each table."""

    embedding_dim: int = Field(gt=0)
    bottom_mlp: list[int] = Field(min_length=1)
    top_mlp: list[int] = Field(min_length=1)

    @model_validator(mode="after")
    def _widths_fit(self) -> ModelSection:
        for name in ("bottom_mlp", "top_mlp"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: every width must be at least 1")
        if self.bottom_mlp[-1] != self.embedding_dim:
            raise ValueError(
                f"the last of bottom_mlp={self.bottom_mlp} is not embedding_dim={self.embedding_dim}, and the two are "
                "multiplied with each other; make them equal"
            )
        return self


class Schedule(Section):
    """Learning rate: a linear rise, a plateau, polynomial decay to zero. Ratios are fractions of the run's updates."""

    lr: float = Field(gt=0)
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    decay_from: float = Field(default=0.0, ge=0, le=1)
    decay_power: float = Field(default=2.0, ge=0)

    def lr_at(self, step: int, steps: int) -> float:
        """Return the learning rate of update ``step`` (0-based) of ``steps``; decay begins after the rise, or later."""
        warmup = round(self.warmup_ratio * steps)
        plateau = max(round(self.decay_from * steps) - warmup, 0)
        if warmup <= step < warmup + plateau:
            return self.lr
        return warmup_polynomial_lr(
            step if step < warmup else step - plateau,
            total_steps=steps - plateau,
            peak_lr=self.lr,
            warmup_steps=warmup,
            power=self.decay_power,
        )


class RunFile(Schedule):
    """A whole run: data, network, batch and schedule.

    ``global_batch`` and ``micro_batch`` count rows. ``micro_batch`` is per rank and one backward pass, a chunk; the
    ranks and the gradient accumulation share ``global_batch`` out.
    """

    seed: int = Field(default=1, ge=0)
    model: ModelSection
    data: Data | None = None
    """The source of the data; may be left out where prepared_data is ready to use."""
    prepared_data: Path | None = None
    """Rows ready to train on; shared by every run that names the same folder. Default: inside the output."""
    epochs: float = Field(default=1.0, gt=0)
    """Passes over the training rows, which give the number of updates."""
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(gt=0)
    evaluation_rows: int | None = Field(default=None, gt=0)
    """At most this many rows of the test set are scored, a random sample; None: all."""
    checkpoint_every: int = Field(gt=0)
    """Updates between checkpoints and evaluations, in addition to the one at the end."""
    keep_checkpoints: int = Field(default=3, ge=1)
    """Complete checkpoints that stay; older ones are deleted when a new one is complete."""

    @model_validator(mode="after")
    def _data_is_known(self) -> RunFile:
        if self.data is None and self.prepared_data is None:
            raise ValueError("data: missing; give data, or prepared_data, a folder that is ready")
        return self

    @property
    def batches(self) -> list[Batches]:
        """The batch sizes of the only phase."""
        return [Batches(self.global_batch, self.micro_batch)]


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read and check a run file. Relative paths in it are relative to the working directory.

    Args:
        overrides: values that replace those of the file: ``KEY=VALUE``.

    Raises:
        InputError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    return read_run_file(path, RunFile, "configs/dlrm/flights.yaml", _describe_error, overrides=overrides)


def _describe_error(problem: Any) -> str:
    location = list(problem["loc"])
    if location[:1] == ["data"]:
        del location[1:2]  # the kind of source, which pydantic inserts and the file does not hold
    return describe({**problem, "loc": location})
