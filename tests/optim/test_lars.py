"""LARS and VR-LARS: options against the dense reference, trust ratios against arithmetic done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd.optim import LARS
from tests.optim.training import BOUND, STEPS, Training

OPTIONS: tuple[dict[str, Any], ...] = (
    {"trust_clip": (0.005, 0.01)},
    {"nesterov": True},
    {"momentum": 0.0},
    {"adapt": False, "lr": 0.1},
    {"eps": 1e-2, "weight_decay": 0.5, "trust_coefficient": 0.1},
)
pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


@pytest.mark.parametrize("name", ["LARS", "VRLARS"])
@pytest.mark.parametrize("options", OPTIONS, ids=["-".join(option) for option in OPTIONS])
def test_options_equal_the_reference(name: str, options: dict[str, Any]) -> None:
    training = Training(name, **options)
    for step in range(STEPS):
        training.step(step, clip=0.5)
    assert training.moved() > 1e-3
    assert training.error() <= BOUND


def one_step(weight: list[float], grad: list[float], **arguments: Any) -> list[float]:
    """The update -dw of the first step."""
    param = torch.tensor(weight, requires_grad=True)
    optimizer = LARS([param], **{"lr": 1.0, "eps": 0.0, "trust_coefficient": 0.1, **arguments})
    param.grad = torch.tensor(grad)
    optimizer.step()
    return (torch.tensor(weight) - param.detach()).tolist()


def test_trust_ratio_by_hand() -> None:
    # |w| = 5, |g| = 10: ratio 0.1 * 5 / 10 = 0.05
    assert one_step([3.0, 4.0], [6.0, -8.0]) == pytest.approx([0.3, -0.4])
    assert one_step([3.0, 4.0], [6.0, -8.0], eps=2.5) == pytest.approx([0.24, -0.32])
    # decay: ratio 0.5 / (10 + 2 * 5) = 0.025 of g + 2 w = (12, 0)
    assert one_step([3.0, 4.0], [6.0, -8.0], weight_decay=2.0) == pytest.approx([0.3, 0.0])
    assert one_step([3.0, 4.0], [6.0, -8.0], trust_clip=(0.0, 0.01)) == pytest.approx([0.06, -0.08])
    assert one_step([3.0, 4.0], [6.0, -8.0], trust_clip=(0.5, 1.0)) == pytest.approx([3.0, -4.0])
    assert one_step([3.0, 4.0], [6.0, -8.0], adapt=False, trust_clip=(0.0, 0.01)) == pytest.approx([6.0, -8.0])
    # Nesterov: step + momentum * step
    assert one_step([3.0, 4.0], [6.0, -8.0], nesterov=True) == pytest.approx([0.57, -0.76])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-18, 1e-21, 1e-25, 1e-30])
def test_without_eps_the_size_of_the_gradient_does_not_matter(size: float, dtype: torch.dtype) -> None:
    weight = torch.randn(50, generator=torch.Generator().manual_seed(1), dtype=dtype)
    grad = torch.randn(50, generator=torch.Generator().manual_seed(2), dtype=dtype)
    found = weight.clone().requires_grad_()
    optimizer = LARS([found], lr=1.0, eps=0.0)
    found.grad = grad * size
    optimizer.step()
    ratio = 0.001 * weight.double().norm() / grad.double().norm()
    torch.testing.assert_close(found.detach().double(), weight.double() - ratio * grad.double(), rtol=1e-6, atol=1e-7)


def test_a_layer_of_zeros_moves() -> None:
    # |w| = 0: ratio 1
    assert one_step([0.0, 0.0], [6.0, -8.0], lr=0.5) == pytest.approx([3.0, -4.0])


def test_a_layer_without_gradient_decays_at_ratio_one() -> None:
    # |g| = 0: ratio 1 of 2 w
    assert one_step([3.0, 4.0], [0.0, 0.0], weight_decay=2.0, lr=0.1) == pytest.approx([0.6, 0.8])
    assert one_step([3.0, 4.0], [0.0, 0.0]) == [0.0, 0.0]
