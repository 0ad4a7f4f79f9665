"""Small images that are drawn, not downloaded, and a run on them."""

from __future__ import annotations

from typing import Any

import torch

from ds_vrgd_recipes.vision.images import ImageSet, SmallImages
from ds_vrgd_recipes.vision.runfile import RunFile


def images(count: int, seed: int) -> ImageSet:
    """Noise whose brightness tells its class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=generator)
    noise = torch.randint(0, 64, (count, 3, 32, 32), generator=generator)
    return ImageSet((noise + 48 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


def small_images() -> SmallImages:
    return SmallImages(images(40, 1), images(11, 2), 4, "123")


def run_file(**changes: Any) -> RunFile:
    """Six updates of 16 images on the 40 of :func:`small_images`."""
    settings = {
        "seed": 3,
        "data": {"source": "fashion-mnist"},
        "model": {"network": "resnet-small", "depth": 8},
        "global_batch": 16,
        "micro_batch": 4,
        "epochs": 2.4,
        "warmup_epochs": 0.8,
        "lr_base_batch": 4,
        "label_smoothing": 0.1,
        "checkpoint_every": 0.8,
        "keep_checkpoints": 5,
    }
    return RunFile.model_validate(settings | changes)
