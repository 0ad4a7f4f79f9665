"""Optimizers and their observers: which is unused, and what becomes of an observer and of groups that come later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd.moments import Ranks
from ds_vrgd.optim import Observer, unused_over
from ds_vrgd.optim.plain import PlainObserver

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


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


def test_a_first_step_without_any_gradient_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    optimizer = ds_vrgd.LAMB(weights(), lr=0.1)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"LAMB: step\(\) finds no gradient .* fully_shard\(\), for one"):
        optimizer.step()
    optimizer.step()
    assert not recwarn


def test_a_later_step_without_any_gradient_does_not(recwarn: pytest.WarningsRecorder) -> None:
    params = weights()
    optimizer = ds_vrgd.LAMB(params, lr=0.1)
    params[0].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert not recwarn


class Engine(Observer):
    """The adapter of an engine, as far as an optimizer that does not step asks it."""

    ranks, window = Ranks(), 0

    def __init__(self) -> None:
        self.detached = False

    def detach(self) -> None:
        self.detached = True

    def drop(self) -> None:
        pass


def test_the_observer_that_is_replaced_is_detached() -> None:
    (param,) = params = weights()[:1]
    optimizer = ds_vrgd.VRSGD(params, lr=0.1)
    plain, engine = optimizer.observer, Engine()
    assert isinstance(plain, PlainObserver)
    param.sum().backward()
    assert plain.finish() == 1
    optimizer.observe(engine)
    param.sum().backward()
    assert not param._backward_hooks
    assert not param._post_accumulate_grad_hooks
    assert plain._moments is None
    optimizer.observe(engine)
    assert not engine.detached
    optimizer.observe(PlainObserver(optimizer.param_groups))
    assert engine.detached


def test_an_optimizer_in_an_engine_is_not_unused() -> None:
    params = weights()
    optimizer = ds_vrgd.VRSGD(params, lr=0.1)
    optimizer.observe(Engine())
    assert unused_over(params) is None


def test_a_group_that_comes_after_the_engine_is_refused_where_it_would_not_be_observed() -> None:
    first, second = weights()
    optimizer = ds_vrgd.VRSGD([first], lr=0.1)
    optimizer.observe(Engine())
    with pytest.raises(ValueError, match="added after the engine was built"):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second], "gamma": 1.0})


@pytest.mark.parametrize("cls", [ds_vrgd.LARS, ds_vrgd.LAMB, ds_vrgd.VRLAMB])
def test_a_group_of_lars_or_lamb_that_comes_after_the_engine_is_refused_without_gsnr_too(cls: Any) -> None:
    first, second = weights()
    optimizer = cls([first], lr=0.1)
    optimizer.observe(Engine())
    with pytest.raises(ValueError, match="added after the engine was built"):
        optimizer.add_param_group({"params": [second], "gamma": 1.0})
    assert len(optimizer.param_groups) == 1


def test_groups_that_a_checkpoint_brings_are_observed_by_their_gamma() -> None:
    params = weights()
    optimizer = ds_vrgd.VRSGD([{"params": [param]} for param in params], lr=0.1)
    copied = copy.deepcopy(optimizer)
    first, second = (group["params"][0] for group in copied.param_groups)
    assert first is not params[0]
    copied.param_groups[1]["gamma"] = 1.0
    copied.load_state_dict(copied.state_dict())
    assert len(first._backward_hooks) == 1
    assert not second._backward_hooks
