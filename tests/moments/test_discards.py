"""Gradients that were thrown away: found, and with as many launches for many parameters as for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vrgd.moments import Discards


class Count(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations_of(count: int) -> int:
    params = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(2)
    discards = Discards()
    with Count() as counted:
        discards.record(params)
        discards.look()
    assert discards.found() == []
    return counted.operations


def test_operations_do_not_grow_with_the_parameters() -> None:
    assert operations_of(50) == operations_of(1) > 0


def test_a_zero_that_stays_while_others_go_was_not_thrown_away() -> None:
    zero, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def found(gone: dict[nn.Parameter, Tensor | None]) -> tuple[set[nn.Parameter], bool]:
        zero.grad, other.grad = torch.zeros(2), torch.ones(2)
        discards = Discards()
        discards.record([zero, other])
        for param, grad in gone.items():
            param.grad = grad
        discards.look()
        discarded = discards.found()
        return set(discarded), discards.are_all(discarded)

    assert found({}) == (set(), False)
    assert found({other: torch.zeros(2)}) == ({other}, True)  # in place, so perhaps the other as well
    assert found({other: None}) == ({other}, False)
    assert found({zero: None}) == ({zero}, False)
    assert found({zero: None, other: None}) == ({zero, other}, True)
