"""The order of training images: sample j of update s depends on the seed alone, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# First entries of a generator's seed keep its purposes apart.
_ORDER, _AUGMENTATION = 0, 1


@dataclass(frozen=True)
class Place:
    """A micro-batch: its update, and the number of its first sample in the walk through all epochs."""

    step: int
    first: int


@dataclass(frozen=True)
class Order:
    """An endless walk through the images, with a new random order in every epoch; an update may span two epochs.

    Attributes:
        images: number of training images.
    """

    images: int
    seed: int
    global_batch: int
    micro_batch: int

    def rows(self, place: Place) -> npt.NDArray[np.int64]:
        """Return the numbers of the images of a micro-batch, (micro_batch,)."""
        walk = np.arange(place.first, place.first + self.micro_batch)
        epochs, within = walk // self.images, walk % self.images
        rows = np.empty(len(walk), np.int64)
        for epoch in np.unique(epochs):
            at = epochs == epoch
            rows[at] = _permutation(self.images, self.seed, int(epoch))[within[at]]
        return rows

    def places(self, first_step: int, steps: int, rank: int, ranks: int) -> Iterator[Place]:
        """Yield one rank's micro-batches from update ``first_step`` on; those of an update go round the ranks."""
        for step in range(first_step, steps):
            for number in range(rank, self.global_batch // self.micro_batch, ranks):
                yield Place(step, step * self.global_batch + number * self.micro_batch)

    def augmentation(self, first: int) -> np.random.Generator:
        """Return the random numbers of the micro-batch that begins at sample ``first``."""
        return np.random.default_rng((_AUGMENTATION, self.seed, first))


@lru_cache(maxsize=2)
def _permutation(images: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((_ORDER, seed, epoch)).permutation(images)
