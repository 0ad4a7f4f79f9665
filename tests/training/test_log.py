"""The run's log: what a resumed run keeps, and what the monitors get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd.training import log
from ds_vrgd.training.log import RunLog, gsnr_record, read_log

MONITORED = ("loss", "lr")


class Monitor:
    csv_monitor = None

    def __init__(self) -> None:
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        self.events += events


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2.0 / step,
        "lr": 0.1 * step,
        "gsnr": {"k": 8, "mean_ratio": 0.3, "clamped_low": 0.2, "clamped_high": 0.1},
    }


def test_records_after_the_resumed_update_are_dropped(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 0, Monitor(), MONITORED)
    for step in (1, 2, 3):
        first.update(record(step))
    first.evaluation(3, {"held_out_loss": 1.5})
    with (tmp_path / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    RunLog(tmp_path, 2, Monitor(), MONITORED).update(record(3))
    assert read_log(tmp_path) == [record(1), record(2), record(3)]


def test_monitors_get_the_same_numbers(tmp_path: Path) -> None:
    monitor = Monitor()
    log = RunLog(tmp_path, 0, monitor, MONITORED)
    log.update(record(4))
    log.evaluation(4, {"held_out_loss": 1.5, "unigram_entropy": 1.6})
    assert ("Train/loss", 0.5, 4) in monitor.events
    assert ("GSNR/clamped_low", 0.2, 4) in monitor.events
    assert ("HeldOut/loss", 1.5, 4) in monitor.events
    assert not [name for name, _, _ in monitor.events if name.endswith("/k")]


def test_optimizers_without_gsnr_have_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert gsnr_record(torch.optim.SGD([parameter], lr=0.1)) is None
    assert gsnr_record(ds_vrgd.LAMB([parameter], lr=0.1)) is None


def test_layers_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"a": ds_vrgd.LayerGSNR(1.0, 0.5, 0.1), "b": ds_vrgd.LayerGSNR(3.0, 0.1, 0.3)}
    monkeypatch.setattr(log.ds_vrgd, "gsnr_stats", lambda engine: ds_vrgd.GSNRStatistics(16, layers))
    assert gsnr_record(object()) == pytest.approx({"k": 16, "mean_ratio": 2.0, "clamped_low": 0.3, "clamped_high": 0.2})
