"""Every rank sees its own rows, all see as many, and the number of ranks changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from ds_vrgd_recipes.clicks.prepared import WORDS, Batch, Clicks, records
from ds_vrgd_recipes.clicks.stream import GROUP, TrainingOrder, evaluation_batches, training_batches


def numbered(*lengths: int) -> Clicks:
    """Parts whose rows hold their own number as the label."""
    numbers = np.arange(sum(lengths), dtype=np.int32)
    rows = np.repeat(numbers[:, None], WORDS, axis=1)
    return Clicks(np.split(rows, np.cumsum(lengths)[:-1]))


def test_an_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    order = TrainingOrder(numbered(300, 5, 0, 300), seed=1)
    rows = order.epoch_rows
    assert rows == 605 // GROUP * GROUP
    epochs = [order.rows(epoch * rows, rows)[:, 0] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(rows))
    assert (epochs[0] != epochs[1]).any()
    assert (order.rows(0, rows)[:, 0] == epochs[0]).all()
    assert (TrainingOrder(order.clicks, seed=2).rows(0, rows)[:, 0] != epochs[0]).any()


def test_a_span_is_a_slice_of_all_parts() -> None:
    clicks = numbered(4, 1, 0, 7)
    for first in range(12):
        for last in range(first, 13):
            assert clicks.span(first, last)[:, 0].tolist() == list(range(first, last))


def test_ranks_share_every_global_batch() -> None:
    order = TrainingOrder(numbered(1000), seed=1)

    def batches(ranks: int) -> list[list[list[int]]]:
        return [
            [batch[:, 0].tolist() for batch in training_batches(order, 16, 96, range(2, 20), rank, ranks)]
            for rank in range(ranks)
        ]

    ((alone),) = batches(1)
    three = batches(3)
    assert [len(of_rank) for of_rank in three] == [36] * 3
    assert [batch for turn in zip(*three, strict=True) for batch in turn] == alone
    # 896 rows an epoch: the walk passes its end in mid-update and goes on
    assert [row for batch in alone for row in batch][:96] == order.rows(2 * 96, 96)[:, 0].tolist()


def test_evaluation_counts_every_row_once() -> None:
    clicks = numbered(100)
    for ranks in (1, 3):
        shares = [list(evaluation_batches(clicks, 50, 8, rank, ranks)) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        assert all(len(batch) == 8 for share in shares for batch, _ in share)
        seen = [row for share in shares for batch, real in share for row in batch[:real, 0].tolist()]
        assert sorted(seen) == list(range(50))


def test_records_come_apart_as_they_were_put_together() -> None:
    rng = np.random.default_rng(0)
    labels, dense = np.array([0, 1, 1]), rng.normal(size=(3, 13)).astype(np.float32)
    categories = rng.integers(2**31, size=(3, 26)).astype(np.int32)
    batch = Batch.of(torch.from_numpy(records(labels, dense, categories)))
    assert batch.labels.tolist() == [0.0, 1.0, 1.0]
    assert torch.equal(batch.dense, torch.from_numpy(dense))
    assert torch.equal(batch.categories, torch.from_numpy(categories))
