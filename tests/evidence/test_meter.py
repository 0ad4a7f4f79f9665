"""The check of the meter: networks side by side are single ones, and a known critical batch is found again."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evidence import meter
from evidence.meter import Setting, drawn, losses, measure, rates, start
from evidence.meter_report import Tuned, critical_batch, draw, tables, tuned

SETTING = Setting("train", "SGD", 32, seed=3, target=1.0)


@pytest.fixture(autouse=True)
def synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten classes that a network can tell, in the place of the digits."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(300) % 10
    centres = torch.rand(10, 64, generator=generator)
    made = (centres[classes] + 0.05 * torch.randn(300, 64, generator=generator), classes)
    monkeypatch.setattr(meter, "digits", lambda: made)


@pytest.mark.parametrize(("optimizer", "place"), [("SGD", 6), ("Adam", 9)])
def test_networks_side_by_side_are_single_ones(optimizer: str, place: int) -> None:
    of_rates = rates(optimizer)
    single = start(3)
    made: Any = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[optimizer]
    stepper = made(single.parameters(), lr=of_rates[place])
    weights: list[Tensor] = [
        param.detach().expand(len(of_rates), *param.shape).clone().requires_grad_() for param in start(3).parameters()
    ]
    update = meter._sgd(torch.tensor(of_rates)) if optimizer == "SGD" else meter._adam(torch.tensor(of_rates), weights)
    for step, (images, classes) in zip(range(1, 11), drawn(SETTING), strict=False):
        loss = nn.functional.cross_entropy(single(images), classes)
        found = losses(weights, images, classes)
        assert found[place].item() == pytest.approx(loss.item(), rel=1e-4)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        grads = torch.autograd.grad(found.sum(), weights)
        with torch.no_grad():
            update(weights, grads, step)


def test_rows_report_and_figure() -> None:
    from matplotlib.figure import Figure

    rows = []
    for kind, batch in (("train", 16), ("train", 64), ("measure", 64)):
        setting = Setting(kind, "SGD", batch, 3, 1.0, rate=0.96 if kind == "measure" else None)
        rows.append({**vars(setting), **measure(setting)})
    reached = [value for value in rows[1]["reached"] if value is not None]
    assert reached
    # the single network of the measurement, at nearly that rate, needs about as many updates
    assert rows[2]["updates"] == pytest.approx(rows[1]["reached"][nearest(0.96)], rel=0.5)
    assert rows[2]["low"] <= rows[2]["scale"] <= rows[2]["high"]
    text = "\n".join(tables(rows, rates))
    assert "| SGD, to 1 | 64 |" in text
    draw(Figure(), rows, rates)


def nearest(rate: float) -> int:
    return min(range(len(rates("SGD"))), key=lambda place: abs(rates("SGD")[place] - rate))


def test_critical_batch_is_found_again() -> None:
    points = [Tuned(batch, 0.1, False, [5000.0 * (1 / batch + 1 / 90)]) for batch in (4, 16, 64, 256, 1024)]
    critical, least = critical_batch(points)
    assert critical == pytest.approx(90, rel=0.01)
    assert least == pytest.approx(5000, rel=0.01)


def test_best_rate_is_that_of_the_median() -> None:
    reached: list[list[int | None]] = [[50, 90, None], [60, 60, None], [70, None, 10]]
    rows = [{"optimizer": "SGD", "batch": 8, "reached": of_seed} for of_seed in reached]
    (found,) = tuned(rows, lambda optimizer: [0.1, 0.2, 0.4])
    assert (found.rate, found.edge, found.updates) == (0.1, True, [50, 60, 70])
    assert found.examples == 480
    (other,) = tuned([rows[0], rows[2], rows[2]], lambda optimizer: [0.1, 0.2, 0.4])
    assert (other.rate, math.isinf(max(other.updates))) == (0.4, True)
