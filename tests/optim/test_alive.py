"""An optimizer that was made and put aside is found; one that is in use, or is over other parameters, is not."""

from __future__ import annotations

import pytest
import torch

import ds_vrgd
from ds_vrgd.optim import unused_over


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]


@pytest.mark.parametrize("cls", [ds_vrgd.VRSGD, ds_vrgd.LAMB])
def test_unused_optimizer_is_found_by_any_of_its_parameters(cls: type[ds_vrgd.VRSGD]) -> None:
    params = weights()
    made = cls(params, lr=0.1)
    assert unused_over(params[1:]) is made
    assert unused_over(weights()) is None


def test_optimizer_that_is_gone_or_has_stepped_is_not() -> None:
    params = weights()
    optimizer = ds_vrgd.VRSGD(params, lr=0.1)
    for _ in range(8):
        (sum(param.sum() for param in params) / 8).backward()
    optimizer.step()
    assert unused_over(params) is None
    other = ds_vrgd.VRSGD(params, lr=0.1)
    assert unused_over(params) is other
    del other
    assert unused_over(params) is None
