"""The vectorised linear regression is VRSGD's own trajectory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ds_vrgd import VRSGD
from evidence.linear import BATCH, DTYPE, WEIGHTS, Setting, draw_inputs, measure, rates_of, train

STEPS = 6
SETTING = Setting("uniform", "rms", "constant", 16, seed=3, rates=3)


def loss_of(setting: Setting, inputs: Tensor, weights: Tensor) -> Tensor:
    """As the paper writes it: of one chunk."""
    residuals = inputs @ torch.arange(1, WEIGHTS + 1, dtype=DTYPE) - inputs @ weights
    if setting.loss == "squared":
        return residuals.square().mean()
    norm = torch.linalg.vector_norm(residuals, 2)
    return norm / len(inputs) ** 0.5 if setting.loss == "rms" else norm


@pytest.mark.parametrize("gamma", [0.1, 1.0])
@pytest.mark.parametrize("loss", ["norm", "rms", "squared"])
def test_trajectory_is_that_of_the_optimizer(loss: str, gamma: float) -> None:
    setting = dataclasses.replace(SETTING, loss=loss)
    rate = float(rates_of(loss, 3)[1])
    rates, gammas = torch.tensor([9.0, rate], dtype=DTYPE), torch.tensor([0.5, gamma], dtype=DTYPE)
    generator = torch.Generator().manual_seed(setting.seed)
    draw_inputs("uniform", generator)  # the test set
    weights = torch.nn.Parameter(torch.zeros(WEIGHTS, dtype=DTYPE))
    optimizer = VRSGD([weights], lr=rate, gamma=gamma)
    for _, (_, found, _) in zip(range(STEPS), train(setting, rates, gammas), strict=False):
        for chunk in draw_inputs("uniform", generator).chunk(setting.k):
            (loss_of(setting, chunk, weights) / setting.k).backward()
        optimizer.step()
        optimizer.zero_grad()
        # Both in fp64: what is left is the order of sums, and VRSGD's variance from merged moments.
        torch.testing.assert_close(found[1], weights.detach(), rtol=1e-9, atol=1e-9)
    assert BATCH % setting.k == 0


def test_a_row_says_when_sgd_is_reached_and_when_weights_settle() -> None:
    """Squared error of normal inputs, condition number 1: SGD contracts every weight's error by 1 - 2 rate a step."""
    row = measure(Setting("normal", "squared", "constant", 64, seed=0, rates=3))
    assert row["grid"][1] == pytest.approx(1.82 * 0.38710 / 3, abs=1e-4)
    settled = row["settled"][1][1]
    # |w_i - i| = i * 0.5303**t < 0.5: t > log(2 i) / 0.6343; the batch's own covariance shifts it by a step at most.
    for index, step in enumerate(settled, start=1):  # of SGD, at the second rate
        assert step == pytest.approx(float(torch.log(torch.tensor(2.0 * index))) / 0.6343, abs=1.6)
    assert row["reached"][-1][1] <= 100
    assert row["curve"][1][1][0] == pytest.approx(385**0.5 * 0.5303, rel=0.05), "the sum of i**2 is 385"
    linear = measure(dataclasses.replace(SETTING, schedule="linear"))
    assert "curve" not in linear, "kept at k = 64 alone"
    assert linear["final"] != measure(SETTING)["final"]
