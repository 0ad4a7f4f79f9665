"""The order of training rows: which rows are micro-batch m of update s, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_vrgd.clicks.prepared import Clicks, Records

#: Rows that stay together in every epoch, 20 kB on the disk. Prepared rows are in random order already, so they are a
#: random sample; to draw single rows would read a page of the disk for each.
GROUP = 128


@dataclass(frozen=True)
class TrainingOrder:
    """Endless walk over a set: a new random order of its groups for every epoch.

    Up to 127 rows at the end of the set, which are as random as all others, are not seen.
    """

    clicks: Clicks
    seed: int

    @property
    def epoch_rows(self) -> int:
        """Rows that an epoch has."""
        return len(self.clicks) // GROUP * GROUP

    def rows(self, first: int, count: int) -> Records:
        """Copy the rows at the positions [first, first + count) of the walk."""
        pieces = []
        while count:
            epoch, place = divmod(first, self.epoch_rows)
            group, offset = divmod(place, GROUP)
            length = min(count, GROUP - offset)
            start = int(_order(self.epoch_rows // GROUP, self.seed, epoch)[group]) * GROUP + offset
            pieces.append(self.clicks.span(start, start + length))
            first, count = first + length, count - length
        return np.concatenate(pieces)


@lru_cache(maxsize=2)
def _order(groups: int, seed: int, epoch: int) -> npt.NDArray[np.uint32]:
    return np.random.default_rng((seed, epoch)).permutation(np.arange(groups, dtype=np.uint32))


def training_batches(
    order: TrainingOrder, micro_batch: int, global_batch: int, steps: range, rank: int, ranks: int
) -> Iterator[Tensor]:
    """One rank's micro-batches, records of [micro_batch, 40], update by update.

    The ranks take the micro-batches of a global batch in turn; each has as many in every update, so no rank can run
    out before another.
    """
    stride = micro_batch * ranks
    for step in steps:
        for first in range(rank * micro_batch, global_batch, stride):
            yield torch.from_numpy(order.rows(step * global_batch + first, micro_batch))


def evaluation_batches(
    clicks: Clicks, rows: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """One rank's share of the first ``rows`` rows: records, and how many of them count.

    Every rank gets the same number of full batches, as sharded models need: what is missing at the end is filled up
    with the set's first row.
    """
    stride = micro_batch * ranks
    for start in range(0, rows, stride):
        first = start + rank * micro_batch
        real = clicks.span(min(first, rows), min(first + micro_batch, rows))
        filled = np.concatenate([real, np.repeat(clicks.span(0, 1), micro_batch - len(real), axis=0)])
        yield torch.from_numpy(filled), len(real)
