"""Backward passes: their beginning and end, one inside another, and the remains of one that broke off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ds_vrgd.moments import BackwardPasses
from tests.support.model import OutOfMemory


class Seen:
    """Takes the gradients of two weights as they come, and notes what each pass has brought."""

    def __init__(self) -> None:
        self.passes, self.ended = BackwardPasses(self.end), list[set[Any]]()
        self.weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
        for index, weight in enumerate(self.weights):
            weight.register_hook(lambda grad, index=index: self.take(index))

    def take(self, index: int) -> None:
        self.passes.take(index)

    def end(self) -> None:
        self.ended.append(self.passes.came)

    def loss(self, broken: Any = lambda x: x) -> Tensor:
        """Return a loss whose backward pass runs one inside for weight 1, and then ``broken``'s, and weight 0's."""
        first, second = self.weights
        loss: Tensor = checkpoint(lambda x: x * second, broken(2.0 * first), use_reentrant=True).sum()
        return loss


def test_a_pass_inside_another_one_is_a_part_of_it() -> None:
    seen = Seen()
    for _ in range(2):
        seen.loss().backward()
    assert seen.ended == [{0, 1}, {0, 1}]
    assert seen.passes.begins
    assert seen.passes.unfinished == set()


def test_a_pass_that_breaks_off_after_the_one_inside_has_ended() -> None:
    seen = Seen()
    with pytest.raises(MemoryError):
        seen.loss(OutOfMemory.apply).backward()
    assert seen.ended == []
    assert seen.passes.broke_off
    assert seen.passes.unfinished == {1}
    (3.0 * seen.weights[0]).sum().backward()  # a later pass ends, and the broken one is not forgotten
    assert seen.ended == [{0}]
    assert seen.passes.unfinished == seen.passes.left == {1}
    seen.passes.forget(1)
    assert seen.passes.unfinished == set()


def test_a_gradient_that_comes_twice_in_a_pass() -> None:
    seen, news = Seen(), list[bool]()
    seen.take = lambda index: news.append(seen.passes.take(0))  # type: ignore[method-assign]
    seen.loss().backward()
    assert news == [True, False]
