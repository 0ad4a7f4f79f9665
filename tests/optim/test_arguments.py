"""Every wrong argument is refused by name, value and range: in the constructor, in a param group, and later."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from ds_vrgd.optim import LAMB, LARS, OPTIMIZERS, VRLAMB, VRSGD, VRMomentum, VROptimizer
from ds_vrgd.optim.arguments import CHECKS, GSNR, OF_THE_WHOLE

NAN = float("nan")
# (argument, value, what the message says): one value just outside each end of the range, and what is no number at all.
WRONG: list[tuple[str, Any, str]] = [
    ("lr", -1e-9, "lr=-1e-09 is out of range: must be >= 0"),
    ("lr", NAN, "lr=nan is not a finite number"),
    ("lr", "1e-3", "lr='1e-3' is not a finite number"),
    ("momentum", -0.1, "momentum=-0.1 is out of range: must be in [0, 1)"),
    ("momentum", 1.0, "momentum=1.0 is out of range: must be in [0, 1)"),
    ("nesterov", 1, "nesterov=1 must be true or false"),
    ("betas", (1.0, 0.9), "betas[0]=1.0 is out of range: must be in [0, 1)"),
    ("betas", [0.9, -0.1], "betas[1]=-0.1 is out of range: must be in [0, 1)"),
    ("betas", 0.9, "betas=0.9 must be two numbers in [0, 1)"),
    ("betas", (0.9, 0.99, 0.999), "betas=(0.9, 0.99, 0.999) must be two numbers in [0, 1)"),
    ("beta3", 1.0, "beta3=1.0 is out of range: must be in [0, 1)"),
    ("beta3", -0.1, "beta3=-0.1 is out of range: must be in [0, 1)"),
    ("eps", -1e-8, "eps=-1e-08 is out of range: must be >= 0"),
    ("weight_decay", -0.01, "weight_decay=-0.01 is out of range: must be >= 0"),
    ("weight_decay", float("inf"), "weight_decay=inf is not a finite number"),
    ("gamma", 0.0, "gamma=0.0 is out of range: must be in (0, 1]"),
    ("gamma", 1.01, "gamma=1.01 is out of range: must be in (0, 1]"),
    ("gamma", True, "gamma=True is not a finite number"),
    ("gsnr_eps", 0.0, "gsnr_eps=0.0 is out of range: must be > 0"),
    ("trust_coefficient", 0.0, "trust_coefficient=0.0 is out of range: must be > 0"),
    ("trust_clip", 10.0, "trust_clip=10.0 must be None or a pair (lo, hi)"),
    ("trust_clip", (2.0, 1.0), "trust_clip=(2.0, 1.0) is out of range: must have 0 <= lo <= hi"),
    ("trust_clip", (-1.0, 1.0), "trust_clip=(-1.0, 1.0) is out of range: must have 0 <= lo <= hi"),
    ("trust_clip", (0.0, NAN), "trust_clip[1]=nan is not a finite number"),
    ("bias_correction", 0, "bias_correction=0 must be true or false"),
    ("adapt", "no", "adapt='no' must be true or false"),
    ("prenormalize", None, "prenormalize=None must be true or false"),
    ("gsnr_dtype", "float16", 'gsnr_dtype=\'float16\' must be "float32" or "bfloat16"'),
    ("reduction", "both", 'reduction=\'both\' must be "auto", "fused" or "observe"'),
    ("ranks_per_node", 0, "ranks_per_node=0 is out of range: must be None or an integer >= 1"),
    ("ranks_per_node", True, "ranks_per_node=True is out of range"),
    ("nonfinite", "ignore", 'nonfinite=\'ignore\' must be "skip" or "error"'),
]
# The ends of the ranges that are inside them.
RIGHT: list[tuple[str, Any]] = [
    ("lr", 0.0),
    ("momentum", 0.0),
    ("betas", (0.0, 0.0)),
    ("betas", [0.9, 0.999]),  # what a JSON gives
    ("beta3", 0.0),
    ("eps", 0),
    ("weight_decay", 0),
    ("gamma", 1e-3),
    ("gamma", 1),
    ("trust_clip", None),
    ("trust_clip", [0.0, 0.0]),
    ("gsnr_dtype", torch.bfloat16),
    ("reduction", "fused"),
    ("ranks_per_node", 1),
    ("nonfinite", "error"),
]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def takes(cls: type[VROptimizer], name: str) -> bool:
    return name in (*cls([weight()]).defaults, *OF_THE_WHOLE) and not (name in GSNR and not cls.reduces_variance)


def test_every_checked_argument_is_tried() -> None:
    assert {name for name, _, _ in WRONG} == set(CHECKS)


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_every_argument_is_checked(cls: type[VROptimizer]) -> None:
    assert set(cls([weight()]).defaults) <= set(CHECKS)


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_out_of_range(name: str, value: Any, message: str) -> None:
    takers = [cls for cls in OPTIMIZERS.values() if takes(cls, name)]
    assert takers
    for cls in takers:
        with pytest.raises(ValueError, match=re.escape(message)):
            cls([weight()], **{name: value})
        if name in OF_THE_WHOLE:
            continue
        with pytest.raises(ValueError, match=re.escape(message)):
            cls([{"params": [weight()]}, {"params": [weight()], name: value}])
        optimizer = cls([weight()])
        with pytest.raises(ValueError, match=re.escape(message)):
            optimizer.add_param_group({"params": [weight()], name: value})


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_ends_of_the_range(name: str, value: Any) -> None:
    for cls in OPTIMIZERS.values():
        if takes(cls, name) and not (name == "momentum" and cls is VRMomentum):
            optimizer = cls([weight()], **{name: value})
            found = getattr(optimizer, name) if name in OF_THE_WHOLE else optimizer.param_groups[0][name]
            assert found == value


@pytest.mark.parametrize("cls", OPTIMIZERS.values())
def test_an_unknown_argument_is_named_with_the_known_ones(cls: type[VROptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__} has no argument momentun=0\.8; it takes ") as raised:
        cls([weight()], momentun=0.8)
    offered = str(raised.value).split("it takes ")[1].split(", ")
    assert "lr" in offered
    assert offered == sorted(offered)
    for name in offered:  # what is offered is accepted
        optimizer = cls([weight()])
        default = getattr(optimizer, name) if name in OF_THE_WHOLE else optimizer.defaults[name]
        cls([weight()], **{name: default})


def test_keys_of_a_group_that_are_no_argument_are_left_alone() -> None:
    # DeepSpeed, Hugging Face and schedulers put their own keys there
    assert VRSGD([{"params": [weight()], "initial_lr": 1.0, "name": "x"}]).param_groups[0]["initial_lr"] == 1.0


@pytest.mark.parametrize("cls", [LAMB, LARS])
@pytest.mark.parametrize("name", GSNR)
def test_optimizers_without_variance_reduction_refuse_its_arguments(cls: type[VROptimizer], name: str) -> None:
    message = rf"{cls.__name__} has no argument {name}=0\.5, .*VR{cls.__name__} does"
    with pytest.raises(ValueError, match=message):
        cls([weight()], **{name: 0.5})
    with pytest.raises(ValueError, match="it takes ") as raised:
        cls([weight()], unknown=1)
    assert name not in str(raised.value)


@pytest.mark.parametrize("cls", [LAMB, LARS])
def test_optimizers_without_variance_reduction_refuse_gamma_in_a_group(cls: type[VROptimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__} has no argument gamma=0\.1"):
        cls([{"params": [weight()], "gamma": 0.1}])


def test_a_checkpoint_of_vrlamb_leaves_lamb_without_variance_reduction() -> None:
    lamb = LAMB([weight()])
    lamb.load_state_dict(VRLAMB([weight()], lr=0.5, gamma=0.1).state_dict())
    assert lamb.param_groups[0]["gamma"] == 1.0
    assert lamb.param_groups[0]["lr"] == 0.5


def test_nesterov_needs_momentum() -> None:
    for groups in ([weight()], [{"params": [weight()], "momentum": 0.0}]):
        with pytest.raises(ValueError, match="nesterov=True needs momentum > 0"):
            VRSGD(groups, nesterov=True)
    VRSGD([{"params": [weight()], "momentum": 0.9}], nesterov=True)


def test_defaults() -> None:
    # the README's and the paper's
    wanted = {"gamma": 0.1, "gsnr_eps": 1e-6, "betas": (0.9, 0.999), "beta3": 0.9, "weight_decay": 0.0}
    for name, cls in OPTIMIZERS.items():
        expected = dict(wanted)
        if not cls.reduces_variance:
            expected["gamma"] = 1.0
        if name == "VRAdamW":
            expected["weight_decay"] = 0.01  # torch.optim.AdamW's
        defaults = cls([weight()]).defaults
        for key in expected.keys() & defaults.keys():
            assert defaults[key] == expected[key], (name, key)
    assert VRMomentum([weight()]).defaults["momentum"] == 0.9
    assert VRSGD([weight()]).defaults["momentum"] == 0.0


def test_a_dtensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(nn.Parameter):
        pass

    monkeypatch.setattr("torch.distributed.tensor.DTensor", Fake)
    with pytest.raises(ValueError, match=r"DTensors .* are not supported"):
        VRSGD([Fake(torch.ones(2))])
