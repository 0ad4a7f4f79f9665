"""Checkpoints of base optimizers, of variance-reducing ones, and those that nobody could continue."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch

from ds_vrgd.optim import LAMB, OPTIMIZERS, VRLAMB, VRAdamW, VRMomentum, VROptimizer
from tests.optim.training import BOUND, Training
from tests.support.model import param_groups

BEFORE, AFTER = 3, 3


def load(optimizer: VROptimizer, state: dict[str, Any]) -> list[str]:
    """Load a checkpoint as it comes from a file; returns what was said."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.load_state_dict(through_a_file(state))
    return [str(warning.message) for warning in said]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def train_base(training: Training, base: torch.optim.Optimizer) -> dict[str, Any]:
    """Some steps of another optimizer on the training's model; returns its checkpoint."""
    for step in range(BEFORE):
        training.backward(step)
        base.step()
        base.zero_grad()
    training.optimizer.zero_grad()  # its chunks are forgotten
    return base.state_dict()


def take_over(training: Training) -> None:
    """Let the reference begin where the optimizer does, without an average."""
    names = {param: name for name, param in training.model.named_parameters()}
    for param, state in training.optimizer.state.items():
        own = training.reference.state[names[param]]
        own |= {key: value.double() for key, value in state.items() if key != "step"}
        own["step"] = int(state["step"])
        training.reference.params[names[param]].copy_(param.detach())


def as_fused_lamb(state: dict[str, Any]) -> dict[str, Any]:
    """The form of DeepSpeed's FusedLamb: steps in an int, options of its own."""
    options = {"max_grad_norm": 0.0, "max_coeff": 10.0, "min_coeff": 0.01}
    known = ("params", "lr", "betas", "eps", "weight_decay", "bias_correction")
    groups = [{key: group[key] for key in known} | options for group in state["param_groups"]]
    kept = {key: {**own, "step": int(own["step"])} for key, own in state["state"].items()}
    return {"state": kept, "param_groups": groups}


def as_fused_adam(state: dict[str, Any]) -> dict[str, Any]:
    """The form of DeepSpeed's FusedAdam: steps in the groups."""
    groups = [{**group, "step": BEFORE} for group in state["param_groups"]]
    kept = {key: {n: v for n, v in own.items() if n != "step"} for key, own in state["state"].items()}
    return {"state": kept, "param_groups": groups}


BASES = {
    "VRAdam": (torch.optim.Adam, {"lr": 5e-3, "weight_decay": 0.01}, lambda state: state),
    "VRAdamW": (torch.optim.AdamW, {"lr": 5e-3, "weight_decay": 0.1}, lambda state: state),
    "VRLAMB": (LAMB, {"lr": 5e-3, "weight_decay": 0.1}, lambda state: state),
    "VRAdamW from FusedAdam": (torch.optim.AdamW, {"lr": 5e-3, "weight_decay": 0.1}, as_fused_adam),
    "VRLAMB from FusedLamb": (LAMB, {"lr": 5e-3, "weight_decay": 0.1}, as_fused_lamb),
    "VRLAMB from AdamW": (torch.optim.AdamW, {"lr": 5e-3, "weight_decay": 0.1}, lambda state: state),
}


@pytest.mark.parametrize("name", BASES)
def test_a_base_optimizers_checkpoint_goes_on_with_a_new_average(name: str) -> None:
    kind, arguments, form = BASES[name]
    eps = {"eps": 1e-6} if "LAMB" in name else {"eps": 1e-8}
    training = Training(name.split()[0], **arguments, **eps)
    without_decay = {"adapt": False} if kind is LAMB else {}
    state = form(train_base(training, kind(param_groups(training.model, **without_decay), **arguments, **eps)))
    said = load(training.optimizer, state)
    assert len(said) == 1
    assert "no exp_avg_gsnr: the moments continue, and the running mean of the ratio begins anew" in said[0]
    loaded = training.optimizer.state_dict()
    assert loaded["param_groups"][0]["gamma"] == 0.1
    assert loaded["param_groups"][1].get("adapt", False) is False  # of the group, not the default
    for key, own in state["state"].items():
        assert set(loaded["state"][key]) == {"step", "exp_avg", "exp_avg_sq", "gsnr_step"}
        assert all(torch.equal(loaded["state"][key][entry], own[entry]) for entry in ("exp_avg", "exp_avg_sq"))
        assert torch.equal(loaded["state"][key]["step"], torch.tensor(float(BEFORE)))
    assert load(training.optimizer, loaded) == said  # saved again before any step
    take_over(training)
    for step in range(BEFORE, BEFORE + AFTER):
        training.step(step)
    assert training.error() <= BOUND
    names = {param: n for n, param in training.model.named_parameters()}
    for param, own in training.optimizer.state.items():
        average = training.reference.state[names[param]]["exp_avg_gsnr"]
        torch.testing.assert_close(own["exp_avg_gsnr"].double(), average, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("name", "base"), [("VRLAMB", LAMB), ("VRAdamW", VRAdamW)])
def test_the_average_is_dropped_where_gsnr_is_off(name: str, base: type[VROptimizer]) -> None:
    training = Training(name)
    for step in range(BEFORE):
        training.step(step)
    state = training.optimizer.state_dict()
    off: dict[str, Any] = {} if base is LAMB else {"gamma": 1.0}
    optimizer = base(param_groups(training.model), **off)
    said = load(optimizer, state)
    assert len(said) == 1
    assert "the checkpoint's exp_avg_gsnr was dropped, for GSNR is off here" in said[0]
    assert optimizer.param_groups[0]["gamma"] == 1.0
    for own, loaded in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert set(loaded) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(own[entry], loaded[entry]) for entry in loaded)


def test_torch_adamw_goes_on_as_vradamw_with_gsnr_off_does() -> None:
    states = []
    for kind, off in ((VRAdamW, {"gamma": 1.0}), (torch.optim.AdamW, {})):
        training = Training("VRAdamW")
        for step in range(BEFORE):
            training.step(step)
        other = kind(param_groups(training.model), lr=1e-9, **off)
        other.load_state_dict(through_a_file(training.optimizer.state_dict()))
        for step in range(BEFORE, BEFORE + AFTER):
            training.backward(step)
            other.step()
            other.zero_grad()
        states.append([weight.detach().clone() for weight in training.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_own_checkpoint_says_nothing_and_is_weights_only(name: str) -> None:
    arguments: dict[str, Any] = {"gsnr_dtype": torch.bfloat16} if name in ("VRAdam", "VRAdamW", "VRLAMB") else {}
    arguments |= {"trust_clip": (0.1, 5.0)} if name in ("VRLAMB", "VRLARS", "LAMB", "LARS") else {}
    training, other = Training(name), Training(name)
    training.optimizer = OPTIMIZERS[name](param_groups(training.model), lr=1e-3, **arguments)
    training.backward(0)
    training.optimizer.step()
    state = training.optimizer.state_dict()
    assert load(other.optimizer, state) == []
    loaded = other.optimizer.state_dict()
    assert loaded["param_groups"] == state["param_groups"]
    for key, own in state["state"].items():
        twin = loaded["state"].get(key, {})
        assert own.keys() == twin.keys()
        for entry, value in own.items():
            assert value.dtype == twin[entry].dtype
            assert torch.equal(value, twin[entry])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_loading_adds_no_option(name: str) -> None:
    """A state dict with more keys than a new optimizer's has is one that ``set_optimizer_state_dict`` cannot load."""
    training = Training(name)
    training.step(0)
    options = set(training.optimizer.param_groups[0])
    load(training.optimizer, training.optimizer.state_dict())
    assert set(training.optimizer.param_groups[0]) == options


def test_the_average_of_a_parameter_without_elements_is_not_taken_for_one_that_is_missing() -> None:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.empty(0))]
    optimizer, again = (VRLAMB(params, lr=0.1) for _ in range(2))
    for factor in (1.0, 2.0):
        (params[0].square().sum() * factor + params[1].sum()).backward()
    optimizer.step()
    assert "exp_avg_gsnr" in optimizer.state[params[1]]
    assert load(again, optimizer.state_dict()) == []
    assert "exp_avg_gsnr" in again.state[params[1]]


def test_momentum_of_torch_goes_on() -> None:
    training = Training("VRMomentum")
    state = train_base(training, torch.optim.SGD(param_groups(training.model), lr=0.1, momentum=0.8))
    assert load(training.optimizer, state) == []
    assert training.optimizer.param_groups[0]["momentum"] == 0.8
    for own, loaded in zip(state["state"].values(), training.optimizer.state_dict()["state"].values(), strict=True):
        assert torch.equal(own["momentum_buffer"], loaded["momentum_buffer"])


def saved(**arguments: Any) -> dict[str, Any]:
    training = Training("VRLAMB", **arguments)
    training.step(0)
    state: dict[str, Any] = training.optimizer.state_dict()
    return state


def without(key: str) -> dict[str, Any]:
    state = saved()
    del state["state"][0][key]
    return state


def reshaped() -> dict[str, Any]:
    state = saved()
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:-1]
    return state


def of_amsgrad() -> dict[str, Any]:
    training = Training("VRLAMB")
    return train_base(training, torch.optim.AdamW(param_groups(training.model), amsgrad=True))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("exp_avg_gsnr"), "VRLAMB finds no exp_avg_gsnr in the checkpoint"),
        (without("exp_avg_sq"), "VRLAMB finds no exp_avg_sq in the checkpoint"),
        (without("step"), "VRLAMB finds no step in the checkpoint"),
        (reshaped(), r"exp_avg in the checkpoint is \(82, 13\), and belongs to a tensor of \(83, 13\)"),
        (of_amsgrad(), "cannot continue a checkpoint with amsgrad=True"),
    ],
)  # fmt: skip
def test_what_is_incomplete_or_foreign_is_refused(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training("VRLAMB").optimizer.load_state_dict(state)


def test_states_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="VRMomentum has no state exp_avg, exp_avg_gsnr, exp_avg_sq, step"):
        Training("VRMomentum").optimizer.load_state_dict(saved())
    training = Training("VRAdam")
    state = train_base(training, torch.optim.AdamW(param_groups(training.model)))
    with pytest.raises(ValueError, match=r"Use VRAdamW for a checkpoint of AdamW"):
        training.optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match=r"have \[4, 5\] tensors, and this optimizer's have \[1\]"):
        VRLAMB([torch.nn.Parameter(torch.ones(2))]).load_state_dict(saved())


def test_a_failed_load_changes_nothing() -> None:
    optimizer = VRMomentum([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    with pytest.raises(ValueError, match="has no state other"):
        optimizer.load_state_dict(
            {"state": {0: {"other": torch.ones(2)}}, "param_groups": [{"params": [0], "lr": 0.5}]}
        )
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not optimizer.state
