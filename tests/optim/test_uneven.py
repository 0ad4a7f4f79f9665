"""Ranks with unequal data: DDP's ``join()`` lets one of them end first, which a variance over all ranks cannot."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ds_vrgd.optim import LAMB, VRAdamW, VROptimizer
from tests.support.ranks import run_on_ranks

WORLD = 3


class Net(nn.Module):
    """With buffers, which DDP sends around in every forward pass, and a layer that may go unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()).square().mean()


def train(
    rank: int, optimizer_of: Any, windows: list[int], *, accumulate: int = 1, joins: str = "ddp", **options: Any
) -> str:
    """Train ``windows[rank]`` windows under join(); return the error of the rank, or "done"."""
    wrapped = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer: VROptimizer = optimizer_of(wrapped.parameters())
    context = wrapped.join(**options) if joins == "ddp" else Join([wrapped], **options)
    try:
        with context:
            for window in range(windows[rank]):
                for index in range(accumulate):
                    generator = torch.Generator().manual_seed(100 * window + 10 * index + rank)
                    with wrapped.no_sync() if index < accumulate - 1 else nullcontext():
                        wrapped(torch.randn(5, 3, generator=generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except RuntimeError as error:
        torch.distributed.destroy_process_group()  # as a rank that fails does: the others no longer wait for it
        return str(error)
    return "done"


def adamw(params: Any) -> VROptimizer:
    return VRAdamW(params, lr=0.01)


def of_even_data(rank: int) -> list[Any]:
    warnings.simplefilter("ignore")
    return [
        train(rank, adamw, [2] * WORLD),
        train(rank, adamw, [1] * WORLD, accumulate=2, joins="generic"),
        # no collective of ours: torch's own semantics
        train(rank, lambda params: LAMB(params, lr=0.01), [1, 3, 2]),
        train(rank, lambda params: VRAdamW(params, lr=0.01, gamma=1.0), [1, 3, 2], accumulate=2),
    ]


def of_uneven_data(rank: int, windows: list[int], accumulate: int, joins: str) -> str:
    warnings.simplefilter("ignore")
    return train(rank, adamw, windows, accumulate=accumulate, joins=joins)


def test_equal_data_and_rules_without_collectives_train_under_join() -> None:
    assert run_on_ranks(WORLD, of_even_data) == [["done"] * 4] * WORLD


def of_terminating(rank: int) -> str:
    warnings.simplefilter("ignore")
    return train(rank, adamw, [2, 1, 2], throw_on_early_termination=True)


def test_torchs_own_early_termination_is_left_alone() -> None:
    told = run_on_ranks(WORLD, of_terminating)
    assert "Rank 1 exhausted all inputs" in told[1]
    assert "at least one rank that exhausted inputs" in told[0] == told[2]


@pytest.mark.parametrize(
    ("windows", "accumulate", "joins"),
    [
        ([2, 2, 1], 1, "ddp"),  # the last rank alone ends first
        ([0, 1, 1], 1, "ddp"),  # a rank that never had data
        ([3, 1, 1], 2, "generic"),  # one rank alone trains on
    ],
)
def test_a_rank_that_has_run_out_of_data_is_named(windows: list[int], accumulate: int, joins: str) -> None:
    told = run_on_ranks(WORLD, of_uneven_data, windows, accumulate, joins)
    longest = max(windows)
    stepping = sum(count == longest for count in windows)
    for count, message in zip(windows, told, strict=True):
        if count == longest:
            assert (
                f"{stepping} of {WORLD} ranks are in step(): the others have run out of data inside DDP's join()"
                in message
            )
            assert "DistributedSampler with drop_last=True" in message
        else:  # torch's join() waits for ranks that have ended
            assert message != "done"
