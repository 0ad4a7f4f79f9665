"""Rows of the tables: a row for what is frequent, one for the rest, one for what is missing."""

from __future__ import annotations

import numpy as np

from ds_vrgd_recipes.clicks.criteo import CATEGORIES, Rows
from ds_vrgd_recipes.clicks.vocabulary import MISSING, RARE, SlotCounts, slots_of


def rows_of(*values: int | None) -> Rows:
    """A row for each value, the same in all 26 features."""
    column = np.array([value or 0 for value in values], dtype=np.uint32)
    missing = np.array([value is None for value in values])
    return Rows(
        np.zeros(len(values), dtype=np.uint8),
        np.zeros((len(values), 13), dtype=np.float32),
        np.repeat(column[:, None], CATEGORIES, axis=1),
        np.repeat(missing[:, None], CATEGORIES, axis=1),
    )


def test_frequent_values_have_rows_of_their_own() -> None:
    counts = SlotCounts(1 << 16)
    for block in (rows_of(5, 5, 7, None), rows_of(5, 9, 9, 0, None)):
        counts.add(block)
    vocabulary = counts.vocabulary(min_count=2)
    # 5 came three times, 9 twice; 7 and 0 once; empty fields are not counted as 0
    assert vocabulary.table_sizes == [4] * CATEGORIES
    encoded = vocabulary.encode(rows_of(5, 9, 7, 0, 123, None))
    assert encoded.shape == (6, CATEGORIES)
    assert sorted(encoded[:2, 0].tolist()) == [2, 3]
    assert encoded[2:, 0].tolist() == [RARE, RARE, RARE, MISSING]
    assert (encoded == encoded[:, :1]).all()


def test_features_are_counted_apart() -> None:
    rows = rows_of(1, 1)
    rows.categories[:, 3] = [1, 2]
    counts = SlotCounts(1 << 16)
    counts.add(rows)
    assert [size for size in counts.vocabulary(2).table_sizes if size == 2] == [2]


def test_slots_spread_what_lies_together_and_cover_the_range() -> None:
    """As many values as slots: a random function fills 1 - 1/e of them, 632 of 1000, with a deviation of 10."""
    for values in (np.arange(1000), np.arange(1000) << 20):
        slots = slots_of(values.astype(np.uint32), 1000)
        assert slots.min() >= 0
        assert slots.max() < 1000
        assert abs(len(np.unique(slots)) - 1000 * (1 - 1 / np.e)) < 50
    assert slots_of(np.array([2**32 - 1], dtype=np.uint32), 3)[0] in (0, 1, 2)


def test_one_slot_holds_everything() -> None:
    counts = SlotCounts(2)
    counts.add(rows_of(*range(100)))
    assert counts.vocabulary(1).table_sizes == [4] * CATEGORIES
