"""The ranks side by side: sums over a layer against the definitions in float64, however the layer is cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments.compare import (
    LARGEST,
    SKETCH,
    Comparison,
    RankSums,
    add_rows_,
    columns_of,
    leave_one_out,
    signs_of,
    views,
)


def empty(layers: int, ranks: int) -> RankSums:
    sums = torch.zeros(layers, columns_of(ranks), dtype=torch.double)
    return views(sums, torch.zeros(layers, 2, ranks, dtype=torch.long))


def rows_of(ranks: int, numel: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    return (mean + torch.randn(ranks, numel, generator=torch.Generator().manual_seed(ranks + numel))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_those_of_the_definitions(ranks: int, dtype: torch.dtype) -> None:
    rows, found = rows_of(ranks, 1003, dtype, mean=100.0), empty(2, ranks)
    add_rows_(rows, [(3, 1000, 1, 0)], found)
    g = rows[:, 3:].double()
    mean, d = g.mean(0), g - g.mean(0)
    torch.testing.assert_close(found.gram[1, :ranks, :ranks], d @ d.T, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(found.gram[1, ranks, :ranks], d @ mean, rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(found.gram[1, ranks, ranks], mean @ mean)
    torch.testing.assert_close(found.square[1], g.square().sum(1))
    signs = torch.zeros(SKETCH, 1000, dtype=torch.double)
    for element in range(1000):
        signs[element % SKETCH, element] = signs_of(torch.tensor(element // SKETCH))
    torch.testing.assert_close(found.sketch[1], d @ signs.T)
    assert not found.gram[0].any()
    assert not found.sketch[0].any()
    assert not found.peak[0].any()


@pytest.mark.parametrize("ranks", [4, 7])
def test_a_leave_one_out_deviation_is_in_standard_deviations_of_the_others(ranks: int) -> None:
    rows, found = rows_of(ranks, 500), empty(1, ranks)
    add_rows_(rows, [(0, 500, 0, 1000)], found)
    g = rows.double()
    for rank in range(ranks):
        others = torch.cat([g[:rank], g[rank + 1 :]])
        # of a difference between one value and the mean of k - 1 others
        spread = others.std(0) * math.sqrt(1.0 + 1.0 / (ranks - 1))
        far = (g[rank] - others.mean(0)).abs() / spread
        largest, element = far.max(0)
        assert float(found.largest[0, 0, rank].sqrt()) == pytest.approx(float(largest), rel=1e-6)
        assert int(found.element[0, 0, rank]) == 1000 + int(element)
        square = (g[rank] - g.mean(0)).square()
        assert float(found.largest[0, 1, rank]) == pytest.approx(float(square.max()), rel=1e-6)
        assert int(found.element[0, 1, rank]) == 1000 + int(square.argmax())


def test_the_deviation_is_bounded_where_the_others_agree() -> None:
    deviations = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]], dtype=torch.double)
    far = leave_one_out(deviations)
    assert far[0, 0] == pytest.approx(2.0e6, rel=0.4)  # (k - 2) over the least share
    assert not far[:, 1].any()  # all agree
    assert not leave_one_out(deviations[:2]).any()  # of two, each is as far as the other


@pytest.mark.parametrize("cuts", [(1,), (250, 251), (16, 500, 999)])
def test_a_layer_may_be_cut_anywhere(cuts: tuple[int, ...]) -> None:
    rows, whole, parts = rows_of(5, 1000), empty(1, 5), empty(1, 5)
    add_rows_(rows, [(0, 1000, 0, 0)], whole)
    for start, end in zip((0, *cuts), (*cuts, 1000), strict=True):
        add_rows_(rows[:, start:end].contiguous(), [(0, end - start, 0, start)], parts)
    for name in RankSums._fields:
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12, msg=name)


def test_a_layer_of_more_columns_than_are_taken_at_once() -> None:
    rows, found = rows_of(4, 200_000), empty(1, 4)
    add_rows_(rows, [(0, 200_000, 0, 5)], found)
    d = rows.double() - rows.double().mean(0)
    torch.testing.assert_close(found.gram[0, :4, :4], d @ d.T)
    assert int(found.element[0, 1, 2]) == 5 + int(d[2].abs().argmax())


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    rows, found, clean = rows_of(4, 100), empty(1, 4), empty(1, 4)
    zeroed = rows.clone()
    for column, value in enumerate((math.nan, math.inf, -math.inf, 2.0 * LARGEST)):
        rows[1, column], zeroed[1, column] = value, 0.0
    add_rows_(rows, [(0, 100, 0, 0)], found)
    add_rows_(zeroed, [(0, 100, 0, 0)], clean)
    assert found.nonfinite.tolist() == [[0.0, 4.0, 0.0, 0.0]]
    assert torch.equal(found.gram, clean.gram)
    assert torch.equal(found.peak, clean.peak)


def test_identical_ranks_have_no_distance_whatever_the_mean() -> None:
    rows, found = rows_of(4, 1000, mean=1e4), empty(1, 4)
    rows[3] = rows[0]
    add_rows_(rows, [(0, 1000, 0, 0)], found)
    c = found.gram[0]
    assert float(c[0, 0] + c[3, 3] - 2.0 * c[0, 3]) <= 1e-12 * float(c[0, 0])
    assert float(c[0, 0] + c[1, 1] - 2.0 * c[0, 1]) > float(c[0, 0])


def test_products_of_sketches_estimate_those_of_deviations() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(200):
        rows, found = torch.randn(2, 640, generator=generator), empty(1, 2)
        rows[1] = 0.7 * rows[0] + 0.3 * rows[1]
        rows = torch.cat([rows, -rows])  # so that the mean is 0
        found = empty(1, 4)
        add_rows_(rows, [(0, 640, 0, 0)], found)
        true = float((rows[0].double() @ rows[1].double()) / (rows[0].double().norm() * rows[1].double().norm()))
        size = float(rows[0].double().norm() * rows[1].double().norm())
        errors.append(float(found.sketch[0, 0] @ found.sketch[0, 1]) / size - true)
    spread = torch.tensor(errors)
    assert abs(float(spread.mean())) < 0.1
    assert float(spread.std()) < 2.0 / math.sqrt(SKETCH)


def test_a_window_sums_its_micro_batches_and_begins_anew() -> None:
    comparison = Comparison(["a", "b"], [0, 1, 2], None, 3)
    runs = [(0, 10, 0, 0), (10, 6, 1, 0)]
    first, second = rows_of(3, 16), rows_of(3, 17)[:, :16].contiguous()
    for _ in range(2):
        for rows in (first, second):
            comparison.add(rows, "buffer", lambda: runs)
        found, expected = comparison.totals(torch.device("cpu")), empty(2, 3)
        for rows in (first, second):
            add_rows_(rows, runs, expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        comparison.clear()
    assert not comparison.totals(torch.device("cpu")).gram.any()
    comparison.add(first, "buffer", lambda: runs)
    comparison.drop([1])
    found = comparison.totals(torch.device("cpu"))
    assert found.gram[0].any()
    assert not found.gram[1].any()
    assert not found.peak[1].any()
