"""The run file: one YAML page that describes a training on images, except for the optimizer (DeepSpeed JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_vrgd.schedules import square_root_scaled_lr, warmup_cosine_lr
from ds_vrgd_recipes.run.launch import Batches
from ds_vrgd_recipes.run.runfile import Section, read_run_file


class FashionMnist(Section):
    """A package of Debian 12, fetched with apt-get and checked by sha256; see docs/DATA.md."""

    source: Literal["fashion-mnist"]


class Cifar10(Section):
    """The folder ``cifar-10-batches-py`` of CIFAR-10's Python version, which no package holds."""

    source: Literal["cifar-10"]
    path: Path


class ImageFolder(Section):
    """ImageNet, or another data set: ``path/train/CLASS/*.JPEG`` and ``path/val/CLASS/*.JPEG``."""

    source: Literal["image-folder"]
    path: Path
    size: int = Field(default=224, ge=32)
    """Pixels of a side in training and evaluation, which crops the middle of an image 8/7 as large."""
    workers: int = Field(default=8, ge=0)
    """Processes per rank that decode images."""


class SmallNetwork(Section):
    """ResNet for 32x32 images, depth 6n + 2."""

    network: Literal["resnet-small"]
    depth: int = Field(ge=8)

    @model_validator(mode="after")
    def _has_whole_blocks(self) -> SmallNetwork:
        if (self.depth - 2) % 6:
            raise ValueError(f"depth={self.depth} is not 6n + 2; use 8, 14, 20, 32, 44, 56 or 110")
        return self


class ResNet50(Section):
    """torchvision's ResNet-50 v1.5."""

    network: Literal["resnet-50"]


class RunFile(Section):
    """A whole run. ``global_batch`` and ``micro_batch`` count images; a micro-batch on one rank is a chunk."""

    seed: int = Field(default=1, ge=0)
    data: Annotated[FashionMnist | Cifar10 | ImageFolder, Field(discriminator="source")]
    model: Annotated[SmallNetwork | ResNet50, Field(discriminator="network")]
    global_batch: int = Field(gt=0)
    micro_batch: int = Field(gt=1)  # BatchNorm needs two
    epochs: float = Field(gt=0)
    warmup_epochs: float = Field(default=0.0, ge=0)
    lr_base_batch: int | None = Field(default=None, gt=0)
    """The JSON's lr is right for this batch, and scales with the square root of the batch. None: for this run's."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    bf16: Literal["auto"] | bool = "auto"
    """Layers compute in bf16 under autocast; weights, statistics, gradients stay in fp32. auto: on an accelerator."""
    evaluate_every: float = Field(default=1.0, gt=0)
    """Epochs between evaluations of the held-out images, and between checkpoints; both happen at the end, too."""
    checkpoint_every: float = Field(default=10.0, gt=0)
    keep_checkpoints: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> RunFile:
        if self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs={self.warmup_epochs} is more than epochs={self.epochs}; lower it")
        small = self.model.network == "resnet-small"
        if small == (self.data.source == "image-folder"):
            raise ValueError(
                f"model.network={self.model.network} is not for data.source={self.data.source}; resnet-small takes "
                "fashion-mnist and cifar-10, resnet-50 an image-folder"
            )
        return self

    @property
    def batches(self) -> list[Batches]:
        """The batch sizes, for DeepSpeed's configuration."""
        return [Batches(self.global_batch, self.micro_batch)]

    def steps(self, images: int) -> int:
        """Return the updates of the run on ``images`` training images, at least one."""
        return max(1, round(self.epochs * images / self.global_batch))

    def is_due(self, every: float, step: int, images: int) -> bool:
        """Return whether update ``step`` (1-based) completes a multiple of ``every`` epochs."""
        period = every * images / self.global_batch
        return int(step / period) > int((step - 1) / period)

    def lr_at(self, step: int, images: int, lr: float) -> float:
        """Return the learning rate of update ``step`` (0-based), for the ``lr`` of the JSON."""
        peak = lr
        if self.lr_base_batch is not None:
            peak = square_root_scaled_lr(lr, self.lr_base_batch, self.global_batch)
        total = self.steps(images)
        warmup = min(total, round(self.warmup_epochs * images / self.global_batch))
        return warmup_cosine_lr(step, total_steps=total, peak_lr=peak, warmup_steps=warmup)


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read and check a run file. Relative paths in it are relative to the working directory.

    Args:
        overrides: values that replace those of the file: ``KEY=VALUE``.

    Raises:
        InputError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    return read_run_file(path, RunFile, "configs/resnet56/256.yaml", overrides=overrides)
