"""Crops and flips of a whole micro-batch, held to numpy's one image at a time."""

from __future__ import annotations

import numpy as np
import torch

from ds_vrgd_recipes.vision.augment import PADDING, crop_and_flip, draw


def test_every_image_is_cropped_and_flipped_by_its_own_numbers() -> None:
    images = torch.randint(0, 256, (9, 3, 8, 6), dtype=torch.uint8)
    drawn = draw(9, np.random.default_rng(1))
    drawn[0] = torch.tensor([PADDING, PADDING, 0])  # as it was
    got = crop_and_flip(images, drawn).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    for image, each, (down, right, flipped) in zip(got, padded, drawn.tolist(), strict=True):
        expected = each[:, down : down + 8, right : right + 6]
        np.testing.assert_array_equal(image, expected[:, :, ::-1] if flipped else expected)
    np.testing.assert_array_equal(got[0], images[0].numpy())


def test_all_places_are_drawn_and_half_are_flipped() -> None:
    drawn = draw(4000, np.random.default_rng(2))
    for offsets in drawn[:, :2].T:
        assert offsets.unique().tolist() == list(range(2 * PADDING + 1))
    assert 0.45 < drawn[:, 2].double().mean() < 0.55  # six standard deviations: 6 * 0.5 / sqrt(4000) = 0.047
