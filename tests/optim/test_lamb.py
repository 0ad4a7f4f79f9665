"""LAMB and VR-LAMB: options against the dense reference, trust ratios against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd.optim import LAMB
from tests.optim.training import BOUND, STEPS, Training

OPTIONS: tuple[dict[str, Any], ...] = (
    {"trust_clip": (0.05, 0.2)},
    {"bias_correction": False},
    {"adapt": False},
    {"prenormalize": True},
    {"prenormalize": True, "bias_correction": False, "trust_clip": (0.0, 10.0)},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.5},
)
pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


@pytest.mark.parametrize("name", ["LAMB", "VRLAMB"])
@pytest.mark.parametrize("options", OPTIONS, ids=["-".join(option) for option in OPTIONS])
def test_options_equal_the_reference(name: str, options: dict[str, Any]) -> None:
    training = Training(name, **options)
    for step in range(STEPS):
        training.step(step, clip=0.5)
    assert training.moved() > 1e-3
    assert training.error() <= BOUND


def one_step(weight: list[float], grad: list[float], **arguments: Any) -> list[float]:
    """The update -dw of one LAMB step without bias correction by betas (0, 0), where u = sign(g)."""
    param = torch.tensor(weight, requires_grad=True)
    arguments = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 0.0, **arguments}
    optimizer = LAMB([param], **arguments)
    param.grad = torch.tensor(grad)
    optimizer.step()
    return (torch.tensor(weight) - param.detach()).tolist()


def test_trust_ratio_by_hand() -> None:
    # |w| = 5, u = (1, -1): ratio 5 / sqrt(2)
    assert one_step([3.0, 4.0], [0.5, -2.0]) == pytest.approx([5 / 2**0.5, -5 / 2**0.5])
    # clipped from above, and from below
    assert one_step([3.0, 4.0], [0.5, -2.0], trust_clip=(0.0, 2.0)) == pytest.approx([2, -2])
    assert one_step([3.0, 4.0], [0.5, -2.0], trust_clip=(6.0, 9.0)) == pytest.approx([6, -6])
    # no adaptation: 1, whatever the clip says
    assert one_step([3.0, 4.0], [0.5, -2.0], adapt=False, trust_clip=(6.0, 9.0)) == pytest.approx([1, -1])
    # decay is inside: u = (1, -1) + 0.5 * (3, 4) = (2.5, 1)
    norm = (2.5**2 + 1) ** 0.5
    assert one_step([3.0, 4.0], [0.5, -2.0], weight_decay=0.5) == pytest.approx([2.5 * 5 / norm, 5 / norm])


def test_a_layer_of_zeros_moves() -> None:
    # |w| = 0: ratio 1, and the update is lr * u
    assert one_step([0.0, 0.0], [0.5, -2.0], lr=0.1) == pytest.approx([0.1, -0.1])


def test_a_layer_without_gradient_keeps_still() -> None:
    # |u| = 0: ratio 1, and the update is 0
    assert one_step([3.0, 4.0], [0.0, 0.0], eps=1e-6) == [0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_prenormalised_updates_do_not_depend_on_the_size_of_the_gradient(scale: float) -> None:
    # g / |g| = (0.6, 0.8); with beta2 = 0 and a large eps its size would show
    found = one_step([3.0, 4.0], [0.6 * scale, 0.8 * scale], eps=1.0, adapt=False, prenormalize=True)
    assert found == pytest.approx([0.6 / 1.6, 0.8 / 1.8], rel=1e-5)


def test_prenormalisation_of_a_zero_gradient() -> None:
    assert one_step([3.0, 4.0], [0.0, 0.0], eps=1e-6, prenormalize=True) == [0.0, 0.0]
