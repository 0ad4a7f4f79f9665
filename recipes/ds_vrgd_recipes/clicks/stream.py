"""The order of training rows: the rows of micro-batch m of update s, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_vrgd_recipes.clicks.prepared import Clicks, Records
from ds_vrgd_recipes.run.ranks import share

#: Rows that stay together in every epoch, 20 kB on the disk. Prepared rows are in random order already, so they are a
#: random sample; drawing single rows would read a page of the disk for each.
GROUP = 128


@dataclass(frozen=True)
class TrainingOrder:
    """An endless walk over a set, with a new random order of its groups for every epoch.

    Up to 127 rows at the end of the set, as random as all others, are never seen.
    """

    clicks: Clicks
    seed: int

    @property
    def epoch_rows(self) -> int:
        """The rows of an epoch."""
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
    """Yield one rank's micro-batches, records of [micro_batch, 40], update by update.

    The micro-batches of a global batch go round the ranks. Each rank has as many in every update, so no rank runs out
    before another.
    """
    stride = micro_batch * ranks
    for step in steps:
        for first in range(rank * micro_batch, global_batch, stride):
            yield torch.from_numpy(order.rows(step * global_batch + first, micro_batch))


def evaluation_batches(
    clicks: Clicks, rows: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield one rank's share of the first ``rows`` rows: records, and how many of them count; see ``ranks.share``."""
    for (first, *_), real in share(rows, micro_batch, rank, ranks):
        missing = np.repeat(clicks.span(0, 1), micro_batch - real, axis=0)
        yield torch.from_numpy(np.concatenate([clicks.span(first, first + real), missing])), real
