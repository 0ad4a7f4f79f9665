"""The ResNet experiment: a run learns, its row is complete, and the tables say what the rows do."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from ds_vrgd_recipes.vision.source import InMemory
from evidence import resnet
from evidence.resnet import Setting
from evidence.resnet_report import PAPER, accuracy, draw, tables
from evidence.tuning import best
from tests.recipes.vision.cases import small_images
from tests.support.ranks import DEVICE

SETTING = Setting("vr_momentum", 16, 1.0, 3, 2, 8, 8.0, 40, 11)  # k = 8


def test_the_largest_batch_comes_first_with_every_optimizer_and_each_setting_once() -> None:
    full = resnet.settings("full")
    # Optimizers; at two batches the rule and half of it, at four the rule, at the two largest its other seeds.
    assert len(full) == len(set(full)) == 8 * (2 * 2 + 4 + 2 * 2)
    assert {setting.batch for setting in full if setting.seed} == {8192, 4096}
    assert {setting.optimizer for setting in full[:8]} == set(PAPER)
    assert {setting.batch for setting in full[:16]} == {8192}
    for setting in full + resnet.settings("small"):
        assert setting.batch // setting.micro_batch >= 8
        resnet.run_of(setting)


def test_two_batches_are_tuned_each_for_itself() -> None:
    def row(batch: int, factor: float, accuracy: float) -> dict[str, Any]:
        return {"optimizer": "lars", "batch": batch, "factor": factor, "seed": 0, "accuracy": accuracy}

    measured = [row(8192, 1.0, 0.8), row(8192, 0.5, 0.7), row(256, 1.0, 0.9), row(256, 0.5, 0.95)]
    measured += [row(2048, 1.0, 0.9), row(2048, 0.5, 0.95), row(2048, 0.25, 0.9)]
    called = [(one.batch, one.factor, one.seed) for one in resnet.follow_up("full", measured)]
    assert called == [(8192, 2.0, 0), (2048, 0.5, 1), (2048, 0.5, 2)]
    assert resnet.follow_up("small", measured) == []


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("optimizer", ["momentum", "vr_momentum", "vr_lamb"])
def test_replayed_passes_train_as_launched_ones(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several gradients are added up, whose memory every replay writes anew."""
    losses = []
    for replaced in ((), ("graph",)):
        for name in replaced:
            monkeypatch.setattr(resnet, name, lambda model, micro_batch: None)
        data = InMemory(small_images(), torch.device(DEVICE))
        row = resnet.train(replace(SETTING, optimizer=optimizer, factor=0.25), data)
        losses.append([loss for _, loss, _ in row["evaluations"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.02)  # bf16


def test_a_run_learns_and_its_row_is_complete() -> None:
    data = InMemory(small_images(), torch.device(DEVICE))
    row = resnet.train(SETTING, data)
    # Four classes that brightness tells apart: guessing is right once in four.
    assert row["accuracy"] > 0.6
    assert row["updates"] == 20  # 8 * 40 / 16
    assert row["rate"] == pytest.approx(0.1414 * math.sqrt(16 / 256))
    assert [epochs for epochs, _, _ in row["evaluations"]] == pytest.approx([1.2, 2.0, 3.2, 4.0, 5.2, 6.0, 7.2, 8.0])
    assert row["evaluations"][-1][1:] == (row["loss"], row["accuracy"])


def test_a_run_that_comes_apart_is_a_row() -> None:
    row = resnet.train(
        replace(SETTING, optimizer="momentum", factor=1e30), InMemory(small_images(), torch.device(DEVICE))
    )
    assert not math.isfinite(row["loss"])
    assert len(row["evaluations"]) < 8


def rows() -> list[dict[str, Any]]:
    accuracy = {(1.0, 0): 0.5, (1.0, 1): 0.7, (0.5, 0): 0.65, (0.5, 1): 0.8}
    return [
        {
            **vars(replace(SETTING, depth=56, optimizer=name, batch=512, factor=factor, seed=seed)),
            "accuracy": value,
            "evaluations": [(1.0, 2.0, value / 2), (2.0, 1.0, value)],
        }
        for name in ("vr_lars", "lars")
        for (factor, seed), value in accuracy.items()
    ]


def test_the_rule_and_the_best_rate_are_told_apart() -> None:
    text = "\n".join(tables(rows()))
    assert "| LARS | 60.00 (50.00–70.00) [2] |" in text
    assert "| LARS, paper | 92.29 |" in text
    assert "| VR-LARS | 72.50 (65.00–80.00) [2] at 0.5 of 2 |" in text
    by_rule_alone = [{**row, "depth": 8} for row in rows() if row["factor"] == 1.0]
    assert "at 1 of" not in (toy := "\n".join(tables(by_rule_alone)))
    assert "paper |" not in toy  # of another network
    assert best([row for row in rows() if row["optimizer"] == "lars"], "factor", accuracy)[0] == 0.5


def test_the_figure_has_a_line_an_optimizer() -> None:
    figure = Figure()
    draw(figure, rows())
    rule, own, epoch = figure.axes
    assert [handle.get_label() for handle in rule.containers] == ["LARS", "VR-LARS"]
    for axis, median, low, high in ((rule, 60.0, 50.0, 70.0), (own, 72.5, 65.0, 80.0)):
        line, _, (bar,) = axis.containers[0].lines
        assert line.get_ydata() == pytest.approx([median])
        assert [place for _, place in bar.get_segments()[0]] == pytest.approx([low, high])
    assert epoch.get_lines()[0].get_ydata() == pytest.approx([30.0, 60.0])
    # Of one rate none is the best.
    draw(more := Figure(), [row for row in rows() if row["optimizer"] == "lars" or row["factor"] == 1.0])
    assert [len(axis.containers) for axis in more.axes] == [2, 1, 0]


def test_where_the_rule_alone_was_run_there_is_nothing_to_choose() -> None:
    figure = Figure()
    draw(figure, [row for row in rows() if row["factor"] == 1.0])
    assert [axis.get_title() for axis in figure.axes] == ["rate by the square-root rule", "batch 512, by the rule"]
