"""Which image comes when: each once an epoch, the same for any number of ranks and from any update on."""

from __future__ import annotations

from itertools import chain

import numpy as np

from ds_vrgd_recipes.vision.order import Order

ORDER = Order(images=10, seed=1, global_batch=8, micro_batch=2)


def test_every_epoch_has_each_image_once_in_an_order_of_its_own() -> None:
    walk = np.concatenate([ORDER.rows(place) for place in ORDER.places(0, 5, 0, 1)])  # 40 samples, four epochs
    epochs = walk.reshape(4, 10)
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_micro_batch_runs_on_over_the_end_of_epochs() -> None:
    one = Order(images=3, seed=1, global_batch=7, micro_batch=7)
    (place,) = one.places(0, 1, 0, 1)
    rows = one.rows(place)
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 1, 2]


def test_ranks_share_an_update_and_a_resumed_run_goes_on() -> None:
    alone = list(ORDER.places(0, 3, 0, 1))
    shares = [list(ORDER.places(0, 3, rank, 2)) for rank in range(2)]
    assert list(chain.from_iterable(zip(*shares, strict=True))) == alone
    assert list(ORDER.places(2, 3, 0, 1)) == alone[8:]


def test_random_numbers_belong_to_the_place() -> None:
    first, again, other = (ORDER.augmentation(first).integers(0, 2**63) for first in (4, 4, 6))
    assert first == again != other
