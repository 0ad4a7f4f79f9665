"""From category values to rows of embedding tables, in memory that does not grow with the data.

A value is hashed into one of ``slots`` counters of its feature (Weinberger et al. 2009). A slot that was counted often
enough has a row of its own in the feature's table; all others share row 0, and so do values that training never saw. An
empty category is row 1. Values in the same slot share its row: with far more slots than values few do.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ds_vrgd_recipes.clicks.criteo import CATEGORIES, Rows

RARE, MISSING = 0, 1
_FIRST = 2  # row of the first slot that was kept


def slots_of(values: npt.NDArray[np.uint32], slots: int) -> npt.NDArray[np.int64]:
    """Return the slot of every value, in [0, slots)."""
    return ((_mixed(values).astype(np.uint64) * np.uint64(slots)) >> np.uint64(32)).astype(np.int64)


def _mixed(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Apply a bijection that destroys any order ("lowbias32" of C. Wellons' hash-prospector)."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x7FEB352D)
    values = (values ^ (values >> np.uint32(15))) * np.uint32(0x846CA68B)
    return values ^ (values >> np.uint32(16))


class SlotCounts:
    """Counts categories by feature, in 8 bytes x 26 x slots."""

    def __init__(self, slots: int) -> None:
        self._counts = np.zeros((CATEGORIES, slots), dtype=np.int64)

    def add(self, rows: Rows) -> None:
        """Count some more rows."""
        slots = self._counts.shape[1]
        for feature in range(CATEGORIES):
            there = rows.categories[~rows.missing[:, feature], feature]
            self._counts[feature] += np.bincount(slots_of(there, slots), minlength=slots)

    def vocabulary(self, min_count: int) -> Vocabulary:
        """Keep the slots that were counted at least ``min_count`` times."""
        kept = [np.flatnonzero(counts >= min_count).astype(np.uint32) for counts in self._counts]
        return Vocabulary(self._counts.shape[1], kept)


class Vocabulary:
    """The rows of the embedding tables by value.

    Args:
        slots: slots of each feature.
        kept: for each feature the slots with a row of their own, ascending.
    """

    def __init__(self, slots: int, kept: list[npt.NDArray[np.uint32]]) -> None:
        self.slots = slots
        self.kept = kept

    @property
    def table_sizes(self) -> list[int]:
        """The rows of each feature's table."""
        return [_FIRST + len(slots) for slots in self.kept]

    @cached_property
    def _row_of_slot(self) -> npt.NDArray[np.int32]:
        """Row of the table by feature and slot, [26, slots]."""
        rows = np.full((CATEGORIES, self.slots), RARE, dtype=np.int32)
        for of_feature, kept in zip(rows, self.kept, strict=True):
            of_feature[kept] = np.arange(_FIRST, _FIRST + len(kept), dtype=np.int32)
        return rows

    def encode(self, rows: Rows) -> npt.NDArray[np.int32]:
        """Return rows of the tables, [rows, 26]."""
        encoded = np.empty(rows.categories.shape, dtype=np.int32)
        for feature in range(CATEGORIES):
            encoded[:, feature] = self._row_of_slot[feature][slots_of(rows.categories[:, feature], self.slots)]
        encoded[rows.missing] = MISSING
        return encoded
