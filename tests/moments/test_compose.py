"""Weights with copies on other ranks: the count of their chunks, and the error where a copy has missed one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments import CombinedMoments, CopiedMoments, ReplicatedMoments


def observed(param: Tensor, chunks: int) -> ReplicatedMoments:
    moments = ReplicatedMoments([param])
    for _ in range(chunks):
        moments.add(param, torch.ones_like(param))
        moments.end_micro_batch()
    return moments


def build(of_rest: int | None, of_copies: tuple[int, ...]) -> CombinedMoments:
    params = [torch.zeros(3) for _ in of_copies]
    copies = {p: CopiedMoments(p, None, observed(p, chunks)) for p, chunks in zip(params, of_copies, strict=True)}
    return CombinedMoments(None if of_rest is None else observed(torch.zeros(3), of_rest), copies, copies)


@pytest.mark.parametrize(
    ("of_rest", "of_copies", "message"),
    [
        (8, (4,), "this stage shares with others have seen 4 chunks in this window, and its other weights 8:"),
        (4, (4, 3), "this stage shares with others have seen 3, 4 chunks in this window, and its other weights 4:"),
        (None, (2, 3), "this stage shares with others have seen 2, 3 chunks in this window: the copies of a weight"),
    ],
)
def test_copies_that_have_not_met_in_every_micro_batch_are_an_error(
    of_rest: int | None, of_copies: tuple[int, ...], message: str
) -> None:
    with_copies = build(of_rest, of_copies)
    with pytest.raises(RuntimeError, match=message) as raised:
        with_copies.finish()
    assert "Train with engine.train_batch() alone" in str(raised.value)


def test_copies_that_have_met_count_the_window() -> None:
    assert build(4, (4, 4)).finish() == 4
    assert build(None, (3,)).finish() == 3
    assert build(5, ()).finish() == 5
