"""The running mean of the ratio in bf16: rounded so that it moves, and kept so through a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ds_vrgd import VRLAMB, gsnr

N = 20_000


@pytest.mark.parametrize("beta3", [0.9, 0.99])
def test_rounding_to_the_nearest_stalls_and_stochastic_rounding_does_not(beta3: float) -> None:
    """An average of 0.5 and a ratio that is now 0.51: every step is worth less than half of bf16's unit there."""
    target = 0.51
    nearest = torch.full((N,), 0.5).to(torch.bfloat16)
    stochastic = nearest.clone()
    exact = 0.5
    for step in range(1, 201):
        nearest = (nearest.float() * beta3 + target * (1 - beta3)).to(torch.bfloat16)
        stochastic = gsnr.round_stochastically(stochastic.float() * beta3 + target * (1 - beta3), 0, step)
        exact = exact * beta3 + target * (1 - beta3)
    assert (nearest == 0.5).all()
    assert stochastic.float().mean().item() == pytest.approx(exact, abs=2e-4)


def test_rounding_keeps_the_mean_and_only_takes_neighbours() -> None:
    values = torch.tensor([0.3, 1.0, 0.1 + 2**-12, 0.99999]).repeat_interleave(N)
    rounded = gsnr.round_stochastically(values, 0, 7).float()
    assert ((rounded - values).abs() <= values * 2**-7).all()
    torch.testing.assert_close(rounded.view(4, N).mean(1), values.view(4, N).mean(1), rtol=1e-4, atol=0)
    exact = torch.tensor([0.5, 0.25, 1.0])
    assert torch.equal(gsnr.round_stochastically(exact, 0, 5).float(), exact)


def test_noise_depends_on_index_and_step_alone() -> None:
    values = torch.full((N,), 0.3)
    whole = gsnr.round_stochastically(values, 0, 3)
    assert torch.equal(gsnr.round_stochastically(values[100:200], 100, 3), whole[100:200])
    assert torch.equal(gsnr.round_stochastically(values.view(20, 1000).t(), 0, 3), whole.view(1000, 20))
    assert not torch.equal(gsnr.round_stochastically(values, 0, 4), whole)


def lowbias32(x: int) -> int:
    """C. Wellons' hash of 32 bits, in integers of any size."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("first", [0, 12345, 2**31 - 7, 2**31 + 7])
@pytest.mark.parametrize("step", [1, 2, 41])
def test_rounding_has_the_bits_of_its_definition(first: int, step: int) -> None:
    values = torch.rand(99, generator=torch.Generator().manual_seed(step))
    seed = lowbias32(step)
    assert gsnr.rounding_seed(step) % 2**32 == seed
    noise = [lowbias32((first + index) % 2**32 ^ seed) & 0xFFFF for index in range(len(values))]
    bits = [(bit + more) & 0xFFFF0000 for bit, more in zip(values.view(torch.int32).tolist(), noise, strict=True)]
    expected = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert torch.equal(gsnr.round_stochastically(values, first, step).float(), expected)


def trained(steps: int) -> tuple[nn.Linear, VRLAMB]:
    torch.manual_seed(0)
    model = nn.Linear(5, 7)
    optimizer = VRLAMB(model.parameters(), lr=0.01, gsnr_dtype="bfloat16")
    train(model, optimizer, range(steps))
    return model, optimizer


def train(model: nn.Linear, optimizer: VRLAMB, steps: range) -> None:
    for step in steps:
        for chunk in range(8):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + chunk))
            model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_keeps_dtype_and_bits() -> None:
    _, optimizer = trained(5)
    half, saved = trained(3)
    other = nn.Linear(5, 7)
    other.load_state_dict(half.state_dict())
    resumed = VRLAMB(other.parameters(), lr=0.01, gsnr_dtype="bfloat16")
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    train(other, resumed, range(3, 5))
    for (weight, state), (twin, loaded) in zip(optimizer.state.items(), resumed.state.items(), strict=True):
        assert loaded["exp_avg_gsnr"].dtype == torch.bfloat16
        assert torch.equal(state["exp_avg_gsnr"], loaded["exp_avg_gsnr"])
        assert torch.equal(weight, twin)


def test_what_the_engine_is_told_survives_a_copy() -> None:
    optimizer = VRLAMB([nn.Parameter(torch.ones(2))], reduction="observe", ranks_per_node=4)
    twin = copy.deepcopy(optimizer)
    assert (twin.reduction, twin.ranks_per_node) == ("observe", 4)
