"""The settings of a fine-tuning."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ds_vrgd.optim import OPTIMIZERS as VR_OPTIMIZERS
from ds_vrgd_recipes.bert.squad.windows import WindowSize
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.launch import Batches

ADAMW = "AdamW"
OPTIMIZERS = (ADAMW, *VR_OPTIMIZERS)


class Settings(BaseModel):
    """One fine-tuning, by the names of the command line. Lengths count tokens.

    The defaults are those of BERT (Devlin et al. 2018, appendix A.3; google-research/bert, run_squad.py).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Path
    predict_file: Path
    output: Path
    # Without a training file the model only answers.
    train_file: Path | None = None
    tokenizer: Path | None = None
    from_scratch: bool = False
    seeds: list[int] = Field(default=[1], min_length=1)
    epochs: int = Field(default=2, ge=1)
    # Windows per update, and windows of one backward pass, the chunks of a VR optimizer. Default: all at once.
    batch_size: int = Field(default=32, ge=1)
    micro_batch: int | None = Field(default=None, ge=1)
    optimizer: str = ADAMW
    lr: float = Field(default=5e-5, gt=0)
    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0)
    # No bf16 autocast on a GPU. The CPU never autocasts.
    fp32: bool = False
    max_length: int = Field(default=384, ge=8)
    doc_stride: int = Field(default=128, ge=1)
    max_question_length: int = Field(default=64, ge=1)
    max_answer_length: int = Field(default=30, ge=1)
    n_best: int = Field(default=20, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.batch_size % self.chunk:
            raise ValueError(
                f"--batch-size {self.batch_size} is not a multiple of --micro-batch {self.micro_batch}; change one"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"--optimizer {self.optimizer} is not known; use one of {', '.join(OPTIMIZERS)}")
        if self.optimizer.startswith("VR") and self.batch_size == self.chunk:
            raise ValueError(
                f"--optimizer {self.optimizer} with --batch-size {self.batch_size} in one piece is k = 1 chunk, which "
                "has no variance; give a smaller --micro-batch"
            )
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"--seeds {self.seeds} names one twice; each gets a folder of its own")
        if self.train_file is None and (self.from_scratch or len(self.seeds) > 1):
            raise ValueError("--from-scratch and several --seeds are for training; give a --train-file")
        return self

    @property
    def chunk(self) -> int:
        """The windows of one backward pass."""
        return self.micro_batch or self.batch_size

    @property
    def batches(self) -> list[Batches]:
        """The batch sizes of the only phase."""
        return [Batches(self.batch_size, self.chunk)]

    @property
    def window(self) -> WindowSize:
        """The lengths by which texts are cut."""
        return WindowSize(self.max_length, self.doc_stride, self.max_question_length)

    def autocasts(self, device: torch.device) -> bool:
        """Return whether training and answering on ``device`` run in bf16 autocast."""
        return device.type == "cuda" and not self.fp32


def check_settings(values: dict[str, object]) -> Settings:
    """Return the settings of the command line's values.

    Raises:
        InputError: a value cannot be used.
    """
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            option = "--" + str(problem["loc"][0]).replace("_", "-") if problem["loc"] else ""
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{option} {problem['input']}: {message}" if option else message)
        raise InputError("; ".join(lines)) from error
