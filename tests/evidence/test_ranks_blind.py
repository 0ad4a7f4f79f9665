"""The blind faults are what their names say, and a row of real ranks and one of a single process are reported."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from evidence import ranks_blind
from evidence.ranks_blind import (
    BATCH,
    CHANGES,
    EXPONENT,
    FAULTS,
    FIRST_STEP,
    Damage,
    Fault,
    Setting,
    batches,
    faults_of,
    made,
    measure,
    replicas,
)
from evidence.ranks_blind_report import draw, of_the_rank, tables

SETTING = Setting("replicas", "convolution", 4, seed=3, decks=1, clean=30, last=30)
FAULT = Fault("one layer halved", 2, 1, "1.weight", 3, 0.5, 30)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Ten classes that a network can learn, in the place of the digits."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(640) % 10
    centres = torch.rand(10, 64, generator=generator)
    found = (centres[classes] + 0.2 * torch.randn(640, 64, generator=generator), classes)
    monkeypatch.setattr(ranks_blind, "digits", lambda: found)
    return found


def test_faults_are_drawn_from_the_seed() -> None:
    setting = replace(SETTING, decks=20, last=200)
    clean, *faults = faults_of(setting)
    assert clean is None
    assert faults == faults_of(setting)[1:]
    assert faults != faults_of(replace(setting, seed=4))[1:]
    drawn = [fault for fault in faults if fault is not None]
    assert {name: sum(fault.name == name for fault in drawn) for name in FAULTS} == dict.fromkeys(FAULTS, 20)
    assert all(fault.rank != fault.other and FIRST_STEP <= fault.step < 200 for fault in drawn)
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert {fault.layer for fault in drawn} == {name for name, _ in made(setting).named_parameters()}
    assert {fault.bit for fault in drawn} == set(EXPONENT)


def test_faults_in_the_data(data: tuple[Tensor, Tensor]) -> None:
    def first(name: str) -> list[tuple[Tensor, Tensor]]:
        return list(itertools.islice(batches(SETTING, 1, replace(FAULT, name=name), data), 5))

    clean = list(itertools.islice(batches(SETTING, 1, None, data), 5))
    same, again, labels = (first(name) for name in list(FAULTS)[:3])
    for step, (images, classes) in enumerate(clean):
        assert images.shape == (4, BATCH, 64)
        for found in (same, again, labels):
            others = [rank for rank in range(4) if rank != 2 or step < 3]
            if found is not labels or step <= 3:  # later, the shuffle has moved the order of the images
                assert all(torch.equal(found[step][0][rank], images[rank]) for rank in others)
                assert all(torch.equal(found[step][1][rank], classes[rank]) for rank in others)
    for step in (3, 4):
        assert torch.equal(same[step][0][2], same[step][0][1])
        assert torch.equal(same[step][1][2], same[step][1][1])
        assert torch.equal(again[step][0][2], clean[2][0][2])
    assert torch.equal(labels[3][0], clean[3][0])
    assert torch.equal(labels[3][1][2].sort().values, clean[3][1][2].sort().values)
    assert not torch.equal(labels[3][1][2], clean[3][1][2])


def test_faults_in_a_gradient() -> None:
    grad = torch.tensor([[1.0, -2.0], [3.0, 4.0]])  # the third element is at half of the size
    changed = {name: replace(FAULT, name=name).change(grad) for name in (*CHANGES, "one NaN", FLIP)}
    assert changed["one layer halved"].tolist() == [[0.5, -1.0], [1.5, 2.0]]
    assert changed["one layer doubled"].tolist() == [[2.0, -4.0], [6.0, 8.0]]
    assert changed["one layer zero"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert changed["one layer's sign flipped"].tolist() == [[-1.0, 2.0], [-3.0, -4.0]]
    assert str(changed["one NaN"].tolist()) == "[[1.0, -2.0], [nan, 4.0]]"
    assert changed[FLIP][1, 0] == 0.5 * 2.0**-126, "3 is 1.5 * 2^1, of exponent 128: bit 30 is the one that is set"
    assert replace(FAULT, name=FLIP).change(0.25 * grad)[1, 0] == 0.75 * 2.0**128
    assert replace(FAULT, name=FLIP, bit=23).change(grad).tolist() == [[1.0, -2.0], [6.0, 4.0]]


FLIP = "one exponent bit flipped"


@pytest.mark.parametrize("model", ["convolution", "transformer"])
def test_hooks_damage_weights_and_gradients(model: str, data: tuple[Tensor, Tensor]) -> None:
    """One process: what the hooks of a rank do to its passes, against gradients without hooks."""
    images, classes = data[0][:BATCH], data[1][:BATCH]
    setting = replace(SETTING, model=model)
    layers = [name for name, _ in made(setting).named_parameters()]
    update = {name: torch.full_like(weight, 0.01) for name, weight in made(setting).named_parameters()}

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        nn.functional.cross_entropy(model(images), classes).backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    clean = gradients(made(setting))
    for layer in layers:
        damaged = made(setting)
        damage = Damage(damaged, replace(FAULT, name="one layer's sign flipped", layer=layer))
        for step in (2, 3, 4):
            damaged.zero_grad()
            damage.step = step
            for name, grad in gradients(damaged).items():
                assert torch.equal(grad, -clean[name] if name == layer and step >= 3 else clean[name])
    damaged, stale = made(setting), made(setting)
    Damage(damaged, replace(FAULT, name="one update missed")).missed |= update
    for name, weight in stale.named_parameters():
        weight.data -= update[name]
    expected, found = gradients(stale), gradients(damaged)
    assert all(torch.equal(found[name], expected[name]) for name in layers)
    assert not torch.equal(found[layers[0]], clean[layers[0]])


def test_a_missed_update_is_that_of_the_step_before(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one process: the faulty rank's gradient is the model's of one update ago in the first step with the fault."""
    seen: list[dict[str, Tensor]] = []
    of_gradients = ranks_blind.ds_vrgd.RankReport.of_gradients
    monkeypatch.setattr(
        ranks_blind.ds_vrgd.RankReport,
        "of_gradients",
        lambda gradients, step: (
            seen.append({k: v.clone() for k, v in gradients[2].items()}),
            of_gradients(gradients, step),
        )[1],
    )
    weights: list[dict[str, Tensor]] = []
    make = made(SETTING)
    monkeypatch.setattr(ranks_blind, "made", lambda setting: make)
    steps = replicas(SETTING, replace(FAULT, name="one update missed"), batches(SETTING, 1, None, data))
    for _ in range(4):
        next(steps)
        weights.append({name: weight.detach().clone() for name, weight in make.named_parameters()})
    images, classes = list(itertools.islice(batches(SETTING, 1, None, data), 4))[3]
    for place, same in ((3, False), (2, True)):  # a step is yielded before its update
        make.load_state_dict(weights[place])
        make.zero_grad()
        nn.functional.cross_entropy(make(images[2]), classes[2]).backward()
        close = [
            weight.grad is not None and torch.allclose(weight.grad, seen[3][name], rtol=1e-3, atol=1e-6)
            for name, weight in make.named_parameters()
        ]
        assert all(close) if same else not any(close)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "model"), [("replicas", "transformer"), ("fsdp2", "convolution")])
def test_row_and_report(ranks: str, model: str) -> None:
    from matplotlib.figure import Figure

    setting = replace(SETTING, ranks=ranks, model=model)
    row = {**vars(setting), **measure(setting)}
    clean, *faulty = row["trainings"]
    assert len(faulty) == len(FAULTS)
    assert clean["clean_steps"] == 30
    assert clean["losses"][1] < clean["losses"][0] < 1.5 * math.log(10)
    by_name = {training["name"]: training for training in faulty}
    for name in ("one NaN", "same batch as another rank"):  # they need no statistics: the faults are really there
        assert by_name[name]["steps"] == 1
        assert by_name[name]["events"][0]["fault"] == FAULTS[name]
        assert of_the_rank(by_name[name])
        assert by_name[name]["events"][0]["step"] == by_name[name]["clean_steps"] == by_name[name]["step"]
    text = "\n".join(tables([row]))
    assert "| one NaN (nonfinite) | 1 | 1 of 1 | 1 of 1 | 1 of 1 | 1 of 1 | 1 | nonfinite 1 |" in text
    draw(Figure(), [row])
