"""The reports of a step at every stage: statistics without the empty layers, and warnings about the user's own line."""

from __future__ import annotations

import warnings
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from tests.support.ranks import run_on_ranks

WORLD = 2
# DeepSpeed's ZeRO-3 fails on a parameter without elements, whatever the optimizer.
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "stage 2, observe": {"zero_optimization": {"stage": 2}},
    "stage 0, bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
}


class Net(nn.Module):
    def __init__(self, empty: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        if empty:
            self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).tanh())
        return (torch.cat([y, self.nothing]) if hasattr(self, "nothing") else y).square().mean()


def late_gamma(setting: dict[str, Any], gammas: tuple[float, float]) -> str:
    """The error of a step whose groups have had ``gammas``, and have 0.1 now."""
    model = Net(empty=False)
    groups = [
        {"params": list(layer.parameters()), "gamma": gamma}
        for layer, gamma in zip((model.first, model.last), gammas, strict=True)
    ]
    optimizer = ds_vrgd.VRSGD(groups, lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 2, **setting}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for group in optimizer.param_groups:
        group["gamma"] = 0.1
    engine.backward(engine(torch.ones(2, 4).to(next(engine.module.parameters()).dtype)))
    try:
        engine.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def measured(rank: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, setting in SETTINGS.items():
        for empty in (True, False):
            arguments = {"lr": 0.01, "reduction": "observe" if "observe" in name else "auto"}
            engine, *_ = deepspeed.initialize(
                model=Net(empty),
                config={
                    "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 2,
                    "optimizer": {"type": "VRLAMB", "params": arguments},
                    **setting,
                },
            )
            generator = torch.Generator().manual_seed(rank)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(4):
                    x = torch.randn(2, 4, generator=generator).to(next(engine.module.parameters()).dtype)
                    engine.backward(engine(x))
                    engine.step()
            about = [warning.filename for warning in caught if "estimates the GSNR from only" in str(warning.message)]
            meter = ds_vrgd.NoiseScaleMeter()
            meter.update(engine)
            stats = ds_vrgd.gsnr_stats(engine)
            found.setdefault(name, []).append(
                (stats, stats.means(), ds_vrgd.noise_scale(engine), meter.state_dict()["layers"], about)
            )
        found[f"late, {name}"] = [late_gamma(setting, gammas) for gammas in ((1.0, 1.0), (0.5, 1.0))]
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    first, second = run_on_ranks(WORLD, measured)
    for name in SETTINGS:
        assert [run[:-1] for run in first[name]] == [run[:-1] for run in second[name]]
        assert [run[-1] for run in second[name]] == [[], []]  # the first rank warns for all
        assert first[f"late, {name}"] == second[f"late, {name}"]
    return first


@pytest.mark.parametrize("name", SETTINGS)
def test_statistics_are_those_of_the_model_without_it(found: dict[str, list[Any]], name: str) -> None:
    with_it, without = found[name]
    assert with_it[0].k == without[0].k == 4
    assert len(with_it[0].layers) == 4
    assert with_it == without


@pytest.mark.parametrize("name", SETTINGS)
def test_the_warning_of_few_chunks_is_about_the_line_that_steps(found: dict[str, list[Any]], name: str) -> None:
    for run in found[name]:
        assert run[-1] == [__file__]


@pytest.mark.parametrize("name", SETTINGS)
def test_gamma_that_is_turned_on_late_is_named(found: dict[str, list[Any]], name: str) -> None:
    every, last = found[f"late, {name}"]
    assert "gamma of param group 0 was 1.0, which turns GSNR off, and is now 0.1" in every
    assert "gamma of param group 1 was 1.0, which turns GSNR off, and is now 0.1" in last
