"""The chunk gradients that are not finite, by parameter, micro-batch and kind."""

from __future__ import annotations

import pytest
import torch

from ds_vrgd.moments import ChunkNorms

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_and_infinity_are_told_apart(dtype: torch.dtype) -> None:
    a, b, c = (torch.zeros(3) for _ in range(3))
    spoiled = {"NaN": torch.tensor([1.0, torch.nan, torch.inf]), "inf": torch.tensor([1.0, 2.0, -torch.inf])}
    norms = ChunkNorms()
    norms.note(0, [(a, torch.full((5,), 6e4, dtype=dtype)), (b, spoiled["NaN"].to(dtype))])
    norms.note(2, [(c, spoiled["inf"].to(dtype)), (a, torch.zeros(0, dtype=dtype))])
    assert bool(norms.any_bad(CPU))
    assert [(param is b, param is c, *rest) for param, *rest in norms.bad()] == [
        (True, False, 0, "NaN"),
        (False, True, 2, "inf"),
    ]


def test_finite_gradients_are_none() -> None:
    norms = ChunkNorms()
    assert not bool(norms.any_bad(CPU))
    norms.note(0, [(torch.zeros(2), torch.full((2,), 1e18))])
    assert not bool(norms.any_bad(CPU))
    assert norms.bad() == []


def test_squares_beyond_fp32_count_as_infinite() -> None:
    # 1e20 is a number of fp32 and its square is none: there r, which is made of squares, would be NaN
    a, b = torch.zeros(2), torch.zeros(2)
    norms = ChunkNorms()
    norms.note(0, [(a, torch.full((2,), 1e20)), (b, torch.full((2,), 1e20, dtype=torch.float64))])
    assert [(param is a, kind) for param, _, kind in norms.bad()] == [(True, "inf")]


def test_what_was_thrown_away_is_forgotten_and_what_comes_later_is_not() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    nan = torch.tensor([torch.nan, 0.0])
    norms = ChunkNorms()
    norms.note(0, [(a, nan), (b, nan)])
    norms.forget(a)
    assert [(param is b, index) for param, index, _ in norms.bad()] == [(True, 0)]
    norms.forget(b)
    assert not bool(norms.any_bad(CPU))
    norms.note(1, [(a, nan)])
    assert [(param is a, index) for param, index, _ in norms.bad()] == [(True, 1)]
    norms.clear()
    assert not bool(norms.any_bad(CPU))


def test_parts_of_a_gradient_are_told_once() -> None:
    a = torch.zeros(4)
    norms = ChunkNorms()
    norms.note(0, [(a, torch.tensor([torch.inf])), (a, torch.tensor([torch.nan])), (a, torch.tensor([torch.inf]))])
    assert [rest for _, *rest in norms.bad()] == [[0, "NaN"]]
