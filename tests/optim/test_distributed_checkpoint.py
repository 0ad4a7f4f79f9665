"""``torch.distributed.checkpoint`` primes an optimizer by a step with zero gradients, and must resume bit for bit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.optim import _NamedOptimizer

import ds_vrgd
from ds_vrgd.optim import OPTIMIZERS, VRAdamW, VRMomentum, VROptimizer
from tests.support.model import batches, make_model, param_groups
from tests.support.trajectory import ARGUMENTS

CHUNKS = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for tokens in batches(number, CHUNKS):
        (model(tokens) / CHUNKS).backward()
    optimizer.step()
    model.zero_grad()  # torch's _NamedOptimizer cannot


class App(dcp.stateful.Stateful):
    """torch's recipe for a training's state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, flatten: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


def build(name: str, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    if name == "AdamW":
        return model, torch.optim.AdamW(param_groups(model), lr=5e-3)
    return model, OPTIMIZERS[name](param_groups(model), **{**ARGUMENTS[name], **changes})


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("name", ["AdamW", *OPTIMIZERS])
def test_resumed_from_a_file_it_trains_on_bit_for_bit(name: str, flatten: bool, tmp_path: Path) -> None:
    straight, one = build(name)
    for number in range(2):
        step(straight, one, number)
    dcp.save({"app": App(straight, one, flatten)}, checkpoint_id=tmp_path, no_dist=True)
    resumed, two = build(name, lr=0.7)
    dcp.load({"app": App(resumed, two, flatten)}, checkpoint_id=tmp_path, no_dist=True)
    assert two.param_groups[0]["lr"] == one.param_groups[0]["lr"]
    for number in range(2, 4):
        step(straight, one, number)
        step(resumed, two, number)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert one.state[p].keys() == two.state[q].keys()
        assert all(torch.equal(one.state[p][key], two.state[q][key]) for key in one.state[p])


def test_a_mean_that_the_file_lacks_begins_anew_and_is_not_called_dropped(tmp_path: Path) -> None:
    base, one = build("LAMB")
    step(base, one, 0)
    dcp.save({"app": App(base, one, False)}, checkpoint_id=tmp_path, no_dist=True)
    reducing, two = build("VRLAMB")
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    with pytest.warns(UserWarning, match=r"VRLAMB: the checkpoint has no exp_avg_gsnr: [^;]* begins anew$"):
        dcp.load({"app": App(reducing, two, False)}, checkpoint_id=tmp_path, planner=planner, no_dist=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_priming_makes_the_state_and_leaves_no_trace(name: str) -> None:
    # saved before its first step, too: a training that was primed is the one that was not
    (plain, one), (primed, two) = build(name), build(name)
    before = [weight.detach().clone() for weight in primed.parameters()]
    state = get_optimizer_state_dict(primed, two)["state"]
    assert all(torch.equal(*pair) for pair in zip(before, primed.parameters(), strict=True))
    assert all(weight.grad is None for weight in primed.parameters())
    assert two.param_groups[0]["lr"] == ARGUMENTS[name]["lr"]
    step(plain, one, 0)
    wanted = one.state[plain.tokens.weight]
    assert set(state["tokens.weight"]) == set(wanted)
    for key, value in state["tokens.weight"].items():
        assert value.shape == wanted[key].shape
        assert value.dtype == wanted[key].dtype
        assert OPTIMIZERS[name]([nn.Parameter(torch.ones(1))]).defaults["gamma"] == 1.0 or not value.count_nonzero()
    step(primed, two, 0)
    if OPTIMIZERS[name].reduces_variance:
        assert all(torch.equal(*pair) for pair in zip(plain.parameters(), primed.parameters(), strict=True))
        assert ds_vrgd.gsnr_stats(two).k == CHUNKS


def test_one_group_with_gamma_one_is_primed_with_the_others() -> None:
    model = make_model()
    first, second = param_groups(model)
    optimizer = VRAdamW([first, {**second, "gamma": 1.0}], lr=5e-3)
    get_optimizer_state_dict(model, optimizer)
    for group, averaged in zip(optimizer.param_groups, (True, False), strict=True):
        for param in group["params"]:
            assert optimizer.state[param]["step"] == 0
            assert ("exp_avg_gsnr" in optimizer.state[param]) == averaged


def test_priming_after_a_window_that_was_thrown_away() -> None:
    model, optimizer = build("VRAdamW")
    model(batches(7, 1)[0]).backward()
    model.zero_grad()  # the optimizer does not hear of it
    get_optimizer_state_dict(model, optimizer)
    plain, other = build("VRAdamW")
    for number in range(2):
        step(model, optimizer, number)
        step(plain, other, number)
    assert all(torch.equal(*pair) for pair in zip(plain.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["VRAdamW", "VRLAMB", "VRMomentum", "VRSGD"])
def test_a_named_optimizer_primes_at_its_own_rate(name: str) -> None:
    models = make_model(), make_model()
    one, two = (
        _NamedOptimizer(model.named_parameters(), OPTIMIZERS[name], module=model, **ARGUMENTS[name]) for model in models
    )
    step(models[0], one, 0)
    saved = copy.deepcopy(one.state_dict())
    two.init_state()
    assert all(torch.equal(*pair) for pair in zip(make_model().parameters(), models[1].parameters(), strict=True))
    assert all(not float(own.get("step", 0.0)) for own in two.state.values())
    two.load_state_dict(saved)
    models[1].zero_grad()
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, (one, two), strict=True):
        step(model, optimizer, 1)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def zeros(weight: Tensor) -> Tensor:
    return (weight * 0.0).sum()


@pytest.mark.parametrize("cls", [VRAdamW, VRMomentum])
def test_a_window_of_zero_gradients_is_a_step_all_the_same(cls: type[VROptimizer]) -> None:
    # two chunks of zeros at a rate that is not zero: the weights decay, and Adam counts
    weight = nn.Parameter(torch.ones(2))
    optimizer = cls([weight], lr=0.1, weight_decay=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            zeros(weight).backward()
        optimizer.step()
    assert torch.allclose(weight, torch.full((2,), 0.95))
    assert optimizer.state[weight].get("step", 1) == 1


def test_a_later_step_without_chunks_is_an_error_whatever_its_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = VRAdamW([weight], lr=0.1)
    for value in (1.0, 3.0):
        (value * weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight.grad = torch.zeros(2)
    with pytest.raises(RuntimeError, match="saw k = 0 chunk gradients"):
        optimizer.step()
