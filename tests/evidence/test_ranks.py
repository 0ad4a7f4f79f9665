"""The injected faults: what each does to a rank, that a copied training goes on alike, and the tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from evidence import ranks
from evidence.ranks import FAULTY, TRAININGS, Fault, Setting, advance, begin, measure
from evidence.ranks_report import draw, tables


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps, and the faults that are told at once."""
    for name, value in {
        "BEFORE": 22, "CLEAN": 3, "LASTING": 1, "WHOLE": ("same", "drift 1"), "OF_LAYER": ("zero", "nan", "bit 7")
    }.items():  # fmt: skip
        monkeypatch.setattr(ranks, name, value)


@pytest.mark.parametrize("training", TRAININGS)
def test_rows_and_their_tables(training: str) -> None:
    from matplotlib.figure import Figure

    rows: list[dict[str, Any]] = []
    for kind in ("clean", "faults"):
        setting = Setting(kind, training, 4, 3)
        rows.append({**vars(setting), **measure(setting)})
    assert all(row["alarms"] == [] for row in rows)
    outcomes = {(of["fault"], of["where"]): of for of in rows[1]["outcomes"]}
    assert len(outcomes) == 2 + 3 * 3
    for (fault, where), of in outcomes.items():
        if fault != "drift 1":
            assert (of["steps"], of["rank"], of["kind"], of["layer"]) == (1, True, True, True), (fault, where, of)
    lines = "\n".join(tables(rows))
    assert f"| {training} | 4 | 3 | 3 | 0 |" in lines
    assert f"| {training} | same | the whole | 1/1, 1, 1; 1 |" in lines
    assert f"| {training} | drift 1 | the whole | 0/1 |" in lines
    figure = Figure()
    draw(figure, rows)
    assert [axis.get_title() for axis in figure.axes] == ["4 ranks"]


def test_a_copy_goes_on_alike_and_alone() -> None:
    training = TRAININGS["perceptron"]()
    state = begin(training, 1)
    for _ in range(3):
        advance(training, state, 4)
    one, other = state.copied(), state.copied()
    for copy in (one, other):
        for _ in range(2):
            advance(training, copy, 4)
    for name, param in state.params.items():
        assert torch.equal(one.params[name], other.params[name])
        assert not torch.equal(one.params[name], param)


def test_a_flipped_bit_makes_one_element_larger() -> None:
    values = torch.full((8,), 3e-3)  # its exponent is 118, or 0b01110110
    ranks._flip(values, 3, torch.Generator().manual_seed(0))
    assert sorted(values.tolist())[-2:] == pytest.approx([3e-3, 3e-3 * 2**8])
    ranks._flip(values, 7, torch.Generator().manual_seed(0))
    assert float(values.max()) > 1e30
    ranks._flip(small := torch.full((2,), 3e-3), 6, torch.Generator().manual_seed(0))  # set in both: it is cleared
    assert float(small.min()) == pytest.approx(3e-3 * 2.0**-64)


def test_faults_are_of_one_rank() -> None:
    training = TRAININGS["language"]()
    state = begin(training, 2)
    for _ in range(2):
        advance(training, state, 4)
    batch = training.batch(4, state.generator)
    others = [rank for rank in range(4) if rank != FAULTY]
    for name in ("same", "repeat", "labels"):
        inputs, targets = Fault(name, None, state).data(batch, state.generator)
        assert torch.equal(inputs[others], batch[0][others])
        assert torch.equal(targets[others], batch[1][others])
    _, shuffled = Fault("labels", None, state).data(batch, state.generator)
    assert sorted(shuffled[FAULTY].flatten().tolist()) == sorted(batch[1][FAULTY].flatten().tolist())
    found = {"1.out.weight": torch.ones(4, 6)}
    Fault("half", "1.out.weight", state).gradients(found, state.step, state.generator)
    assert found["1.out.weight"].mean(1).tolist() == [1.0, 1.0, 0.5, 1.0]
    spoiled = {"1.out.weight": torch.ones(4, 6)}
    fault = Fault("nan", "1.out.weight", state)
    for step in (state.step, state.step + 1):  # it passes
        fault.gradients(spoiled, step, state.generator)
    assert [sum(map(math.isnan, row)) for row in spoiled["1.out.weight"].tolist()] == [0, 0, 1, 0]
    behind = Fault("drift 1", None, state).behind(training, state.params, batch)
    assert behind is not None
    assert Fault("half", None, state).behind(training, state.params, batch) is None
