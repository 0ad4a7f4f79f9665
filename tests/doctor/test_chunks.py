"""Chunk gradients of the plain model, and how far others are from them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_vrgd.doctor.chunks import chunk_gradients, difference, loss_of


def test_scale_is_divided_out_and_random_numbers_are_repeated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 50), torch.nn.Dropout(), torch.nn.Linear(50, 1), torch.nn.Flatten(0))
    plain = torch.nn.Module()
    plain.inner = model
    plain.forward = lambda x: model(x).square().mean()
    batches = [torch.ones(2, 3), torch.ones(2, 3)]
    one, two = chunk_gradients(plain, batches, 1.0, seed=5), chunk_gradients(plain, batches, 0.25, seed=5)
    assert difference(one, two) < 1e-6
    assert difference(one[:1], one[1:]) > 1e-2, "both chunks dropped the same"


def test_loss_is_found_for_every_form_of_batch_and_output() -> None:
    def model(a: Any, b: Any = 1.0) -> Any:
        return SimpleNamespace(loss=a * b)

    two = torch.tensor(2.0)
    assert loss_of(model, two) == 2
    assert loss_of(model, (two, 3.0)) == 6
    assert loss_of(model, {"a": two, "b": 4.0}) == 8
    with pytest.raises(TypeError, match="the model returns tuple: return the loss, one number"):
        loss_of(lambda a: (a,), two)


def test_difference_is_of_the_whole_gradient_and_infinite_otherwise() -> None:
    one = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    other = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}
    assert difference([one], [one]) == 0
    assert difference([one, other], [one, one]) == pytest.approx(0.1)
    assert difference([{"w": one["w"]}], [one]) == math.inf
    assert difference([one], [one | {"b": torch.tensor([math.nan])}]) == math.inf
