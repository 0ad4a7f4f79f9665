"""State dicts that an older version of this package saved load bitwise, and continue as the run that never stopped.

``data/saved_by_cfb1a73.pt`` is what :func:`save` wrote with the code of commit cfb1a73 (torch 2.13): every argument of
the four optimizers away from its default.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_vrgd

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")
SAVED = Path(__file__).parent / "data" / "saved_by_cfb1a73.pt"
SAVED_AT, STEPS, CHUNKS = 3, 6, 4
# An update may sum and round in another order today: what docs/EXACTNESS.md allows.
ROUNDING = 8e-7
WHOLE: dict[str, Any] = {"reduction": "observe", "ranks_per_node": 2, "nonfinite": "error"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "VRLAMB": {
        "lr": 0.02, "betas": (0.8, 0.99), "beta3": 0.7, "eps": 1e-5, "weight_decay": 0.1, "gamma": 0.2,
        "gsnr_eps": 1e-5, "gsnr_dtype": "bfloat16", "bias_correction": False, "trust_clip": (0.1, 5.0), "adapt": True,
        "prenormalize": True, **WHOLE,
    },
    "VRAdamW": {
        "lr": 0.02, "betas": (0.8, 0.99), "beta3": 0.7, "eps": 1e-5, "weight_decay": 0.1, "gamma": 0.2,
        "gsnr_eps": 1e-5, "gsnr_dtype": torch.float32, **WHOLE,
    },
    "VRMomentum": {
        "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "gamma": 0.2, "gsnr_eps": 1e-5, **WHOLE,
    },
    "LARS": {
        "lr": 0.5, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "trust_coefficient": 0.02, "eps": 1e-5,
        "trust_clip": (0.001, 5.0), "adapt": True,
    },
}  # fmt: skip


def build(name: str) -> tuple[dict[str, nn.Parameter], Any]:
    """Two layers in two param groups, the second with options of its own."""
    generator = torch.Generator().manual_seed(3)
    weights = {key: nn.Parameter(torch.randn(size, generator=generator)) for key, size in (("w", (5, 3)), ("b", (7,)))}
    own = {"adapt": False} if "adapt" in ARGUMENTS[name] else {"lr": 0.01}
    groups = [{"params": [("w", weights["w"])]}, {"params": [("b", weights["b"])], "weight_decay": 0.0, **own}]
    return weights, getattr(ds_vrgd, name)(groups, **ARGUMENTS[name])


def train(weights: dict[str, nn.Parameter], optimizer: Any, steps: range) -> None:
    """Gradients that depend on the step alone, and are exact: no sum of a model's is in them."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for _ in range(CHUNKS):
            slopes = [torch.randn(weight.shape, generator=generator) for weight in weights.values()]
            torch.autograd.backward(list(weights.values()), slopes)
        optimizer.step()
        optimizer.zero_grad()


def values(weights: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {key: weight.detach().clone() for key, weight in weights.items()}


def save() -> None:
    """Write the state dicts, and where each run ends that never stopped."""
    written = {}
    for name in ARGUMENTS:
        weights, optimizer = build(name)
        train(weights, optimizer, range(SAVED_AT))
        written[name] = {"weights": values(weights), "state": copy.deepcopy(optimizer.state_dict())}
        train(weights, optimizer, range(SAVED_AT, STEPS))
        written[name] |= {"ended": values(weights), "end_state": optimizer.state_dict()}
    torch.save(written, SAVED)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return all(key in found and same(found[key], value) for key, value in expected.items())
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_state_of_an_older_version_continues(name: str) -> None:
    saved = torch.load(SAVED, weights_only=True)[name]
    weights, optimizer = build(name)
    twin_weights, twin = build(name)
    with torch.no_grad():
        for key, value in saved["weights"].items():
            weights[key].copy_(value)
            twin_weights[key].copy_(value)
    optimizer.load_state_dict(saved["state"])
    assert same(optimizer.state_dict(), saved["state"])
    # Never stopped: the same tensors, put where the optimizer keeps its state, with nothing loaded.
    for index, weight in enumerate(twin_weights.values()):
        twin.state[weight] = copy.deepcopy(saved["state"]["state"][index])
    for pair in ((weights, optimizer), (twin_weights, twin)):
        train(*pair, range(SAVED_AT, STEPS))
    assert same(values(weights), values(twin_weights))
    assert same(optimizer.state_dict()["state"], twin.state_dict()["state"])
    for key, ended in saved["ended"].items():
        assert (weights[key] - ended).norm() <= ROUNDING * ended.norm()
        assert (ended - saved["weights"][key]).norm() > 0.01 * ended.norm()
