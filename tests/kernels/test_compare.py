"""The comparison of the ranks: the kernel against the sums in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ds_vrgd.kernels.compare import Columns, compare_rows
from ds_vrgd.moments.compare import LARGEST, LEAST_SHARE, SKETCH, RankSums, Run, add_rows_, columns_of, views
from tests.kernels.conftest import COMPILED

#: Layers of a buffer: one begins in the middle of the flattened layer, one is shorter than a row of the sketch, there
#: is padding, and the last one has two parts, as where nodes send what several ranks own.
RUNS: list[Run] = [(0, 2100, 0, 0), (2100, 5, 1, 7), (2110, 70, 2, 1003), (2180, 64, 3, 0), (2250, 40, 3, 64)]


def empty(ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    sums = torch.zeros(4, columns_of(ranks), dtype=torch.double, device=device)
    return sums, torch.zeros(4, 2, ranks, dtype=torch.long, device=device)


def rows_of(ranks: int, dtype: torch.dtype, device: torch.device, mean: float = 0.0) -> Tensor:
    rows = mean + torch.randn(ranks, 2304, generator=torch.Generator().manual_seed(ranks))
    rows[:, ::7] = 0.0
    rows[:, 2290:] = math.nan  # padding, which nobody may read
    return rows.to(dtype).to(device)


def both(rows: Tensor) -> tuple[RankSums, RankSums]:
    found, right = empty(len(rows), rows.device), empty(len(rows), torch.device("cpu"))
    for _ in range(2):
        compare_rows(rows, Columns(RUNS, rows.device), *found, SKETCH, LARGEST, LEAST_SHARE)
        add_rows_(rows.cpu(), RUNS, views(*right))
    return views(*(part.cpu() for part in found)), views(*right)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, torch.bfloat16),
        (4, torch.float32),
        (8, torch.float16),
        pytest.param(16, torch.bfloat16, marks=pytest.mark.skipif(not COMPILED, reason="minutes in the interpreter")),
    ],
)
def test_equals_the_sums_in_float64(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    found, right = both(rows_of(ranks, dtype, device, mean=0.5))
    for layer, (mine, theirs) in enumerate(zip(found.gram, right.gram, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6 * float(theirs.abs().max()), msg=f"{layer}")
    torch.testing.assert_close(found.sketch, right.sketch, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.square, right.square, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.nonfinite, right.nonfinite)
    # What the others leave of all ranks' squares is rounded where one rank has nearly all.
    torch.testing.assert_close(found.largest, right.largest, rtol=5e-3, atol=1e-6)
    assert torch.equal(found.element[:, 1], right.element[:, 1])
    if ranks > 2:
        assert (found.element[:, 0] == right.element[:, 0]).float().mean() > 0.9  # equals may be told apart by rounding


def test_values_that_are_not_finite_are_counted_and_left_out(device: torch.device) -> None:
    rows = rows_of(4, torch.float32, device)
    for column, value in enumerate((math.nan, math.inf, -math.inf, 2.0 * LARGEST)):
        rows[1, 10 + column] = value
    found, right = both(rows)
    assert found.nonfinite.tolist() == [[0.0, 8.0, 0.0, 0.0]] + [[0.0] * 4] * 3
    torch.testing.assert_close(found.gram, right.gram, rtol=1e-5, atol=1e-3)


def test_identical_ranks_have_no_distance(device: torch.device) -> None:
    rows = rows_of(8, torch.bfloat16, device, mean=30.0)
    rows[5] = rows[2]
    found, _ = both(rows)
    gram = found.gram
    gap = gram[:, 5, 5] + gram[:, 2, 2] - 2.0 * gram[:, 5, 2]
    assert (gap.abs() <= 1e-5 * gram[:, 5, 5]).all()


def test_rows_with_a_stride(device: torch.device) -> None:
    rows = rows_of(4, torch.float32, device)
    strided = torch.full((4, 2400), math.nan, device=device)
    strided[:, 11 : 11 + rows.shape[1]] = rows
    expected, _ = both(rows)
    found, _ = both(strided[:, 11 : 11 + rows.shape[1]])
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
