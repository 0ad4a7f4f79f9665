"""Random crops and flips of a whole micro-batch at once, on its device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

PADDING = 4  # pixels on every side (He et al. 2016, section 4.2)


def draw(count: int, generator: np.random.Generator) -> Tensor:
    """Draw for each image the offsets of its crop (down, right), and whether it is flipped: (count, 3), int64.

    The numbers come from the CPU, so that they are the same for any device.
    """
    offsets = generator.integers(0, 2 * PADDING + 1, (count, 2))
    return torch.from_numpy(np.concatenate([offsets, generator.integers(0, 2, (count, 1))], axis=1))


def crop_and_flip(images: Tensor, drawn: Tensor) -> Tensor:
    """Pad by four black pixels, crop to the old size, and mirror some images from left to right.

    Args:
        images: (n, c, h, w).
        drawn: result of :func:`draw`, on the device of the images.

    Returns:
        (n, c, h, w), channels last in memory.
    """
    count, _, height, width = images.shape
    padded = functional.pad(images, [PADDING] * 4)
    down, right, flipped = drawn[:, :, None].unbind(1)  # each (n, 1)
    rows = down + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = right + torch.where(flipped.bool(), width - 1 - columns, columns)
    each = torch.arange(count, device=images.device)[:, None, None]
    return padded[each, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
