"""gamma = 1 is the base optimizer, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd.optim import OPTIMIZERS
from tests.support.model import batches, make_model, param_groups

BASES: dict[str, tuple[str, dict[str, Any], type[torch.optim.Optimizer] | str, dict[str, Any]]] = {
    "SGD": ("VRSGD", {}, torch.optim.SGD, {}),
    "SGD with momentum": ("VRSGD", {"momentum": 0.8}, torch.optim.SGD, {"momentum": 0.8}),
    "momentum": ("VRMomentum", {}, torch.optim.SGD, {"momentum": 0.9}),
    "Nesterov": ("VRMomentum", {"nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adam": ("VRAdam", {"betas": (0.8, 0.95)}, torch.optim.Adam, {"betas": (0.8, 0.95)}),
    "AdamW": ("VRAdamW", {"eps": 1e-6}, torch.optim.AdamW, {"eps": 1e-6}),
    "LAMB": ("VRLAMB", {}, "LAMB", {}),
    "LAMB with options": (
        "VRLAMB",
        {"trust_clip": (0.1, 0.5), "bias_correction": False, "prenormalize": True},
        "LAMB",
        {"trust_clip": (0.1, 0.5), "bias_correction": False, "prenormalize": True},
    ),
    "LARS": ("VRLARS", {}, "LARS", {}),
    "LARS with options": ("VRLARS", {"nesterov": True, "momentum": 0.5}, "LARS", {"nesterov": True, "momentum": 0.5}),
}


def train(optimizer: type[torch.optim.Optimizer], dtype: torch.dtype, **arguments: Any) -> list[torch.Tensor]:
    """Five steps of two micro-batches, with decay on matrices only; the weights."""
    model = make_model().to(dtype)
    made = optimizer(param_groups(model), lr=0.02, weight_decay=0.05, **arguments)  # type: ignore[call-arg]
    for step in range(5):
        for tokens in batches(step, 2):
            model(tokens).backward()
        made.step()
        made.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", BASES)
def test_gamma_one_is_the_base(case: str, dtype: torch.dtype) -> None:
    name, arguments, base, base_arguments = BASES[case]
    found = train(OPTIMIZERS[name], dtype, gamma=1.0, **arguments)
    expected = train(OPTIMIZERS[base] if isinstance(base, str) else base, dtype, **base_arguments)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    start = [param.detach().to(dtype) for param in make_model().parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(found, start, strict=True))


def test_the_default_arguments_are_those_of_torch() -> None:
    # lr, betas, eps, weight_decay, as far as torch has them
    for name, base in (("VRAdam", torch.optim.Adam), ("VRAdamW", torch.optim.AdamW), ("VRSGD", torch.optim.SGD)):
        ours = OPTIMIZERS[name]([torch.zeros(1)]).defaults
        theirs = base([torch.zeros(1)]).defaults
        common = set(ours) & set(theirs)
        assert common >= {"lr", "weight_decay"}
        assert {key: ours[key] for key in common} == {key: theirs[key] for key in common}
