"""A small folder of JPEGs, and torchvision as far as it can be imported."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image


@cache
def has_torchvision() -> bool:
    """Whether it is there; in a build for another torch (CUDA's beside the CPU's) without its kernels.

    Such a build cannot load them, and its import stops where two of them, of which nothing here makes use, are not
    there. Data sets, transforms and networks are plain Python.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or not found.submodule_search_locations:
        return False
    try:
        torch.ops.load_library(str(Path(found.submodule_search_locations[0]) / "_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def image_folder(path: Path, train: int = 8, held_out: int = 3) -> Path:
    """Two classes, dark and bright, of images of many sizes and of both kinds that JPEG has, grey and coloured."""
    rng = np.random.default_rng(1)
    for part, count in (("train", train), ("val", held_out)):
        for number in range(count):
            folder = path / part / ("bright" if number % 2 else "dark")
            folder.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(40, 90, 2)
            pixels = rng.integers(0, 100, (height, width, 3)) + 150 * (number % 2)
            image = Image.fromarray(pixels.astype(np.uint8))
            (image.convert("L") if number == 2 else image).save(folder / f"{number}.JPEG")
    return path
