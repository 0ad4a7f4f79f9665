"""The run's log: what a resumed run keeps, and what the monitors get."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.log import RunLog, gsnr_record, layers_record, ranks_record, read_log

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
        "gsnr": {
            "k": 8, "mean_ratio": 0.3, "clamped_low": 0.2, "clamped_high": 0.1, "batch": 64,
            "noise_trace": 3.0 + step % 2, "noise_signal": 0.01 * step,
        },
    }  # fmt: skip


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
    log.update({**record(5), "gsnr": {**record(5)["gsnr"], "noise_low": 0.28}})
    log.evaluation(4, {"held_out_loss": 1.5, "unigram_entropy": 1.6})
    assert ("Train/loss", 0.5, 4) in monitor.events
    assert ("GSNR/clamped_low", 0.2, 4) in monitor.events
    assert [event for event in monitor.events if event[0] == "GSNR/noise_low"] == [("GSNR/noise_low", 0.28, 5)]
    assert ("HeldOut/loss", 1.5, 4) in monitor.events
    assert not [name for name, _, _ in monitor.events if name.endswith("/k")]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b'{"step": 2, "lo', b"[1]", b"3", b'{"loss": 1.0}', b'{"step": "2"}', b"[" * 100_000, b""]
)
def test_a_damaged_line_is_named_with_the_way_out(tmp_path: Path, line: bytes) -> None:
    RunLog(tmp_path, 0, Monitor(), MONITORED).update(record(1))
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(line + b"\n" + b'{"step": 3}\n')
    with pytest.raises(
        InputError, match=r"log\.jsonl is damaged: line 2 holds b'.* move it elsewhere, and the"
    ) as found:
        RunLog(tmp_path, 2, Monitor(), MONITORED)
    assert len(str(found.value)) < 500
    (tmp_path / "log.jsonl").rename(tmp_path / "old")
    RunLog(tmp_path, 2, Monitor(), MONITORED)


def test_a_damaged_csv_file_is_named_with_the_way_out(tmp_path: Path) -> None:
    monitor = Monitor()
    monitor.csv_monitor = SimpleNamespace(log_dir=str(tmp_path / "csv"), filenames=[])  # type: ignore[assignment]
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / "Train_loss.csv").write_bytes(b"step,Train_loss\n1,2.0\n2,\xff\n")
    with pytest.raises(
        InputError, match=r"Train_loss\.csv is damaged: it is not text .*; move it elsewhere, and the run"
    ):
        RunLog(tmp_path, 2, monitor, MONITORED)


def test_optimizers_without_gsnr_have_no_record() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    for optimizer in (torch.optim.SGD([parameter], lr=0.1), ds_vrgd.LAMB([parameter], lr=0.1)):
        engine = SimpleNamespace(optimizer=optimizer)
        assert gsnr_record(engine) is None
        assert layers_record(engine) is None


class Engine:
    """What a log asks of an engine: chunks of 2 samples, in which one layer has 4 elements and the other one 2."""

    def __init__(self, k: int = 4) -> None:
        generator = torch.Generator().manual_seed(1)
        params = [(name, torch.nn.Parameter(torch.ones(size))) for name, size in (("a", 4), ("b", 2))]
        self.optimizer = ds_vrgd.VRSGD(params, lr=0.0, gamma=0.2)
        for _ in range(k):
            losses = [(1.0 + torch.randn(param.shape, generator=generator)) @ param for _, param in params]
            (sum(losses) / k).backward()
        self.optimizer.step()
        self.optimizer.overflow = False

    def train_micro_batch_size_per_gpu(self) -> int:
        return 2

    def train_batch_size(self) -> int:
        return 8


def test_ranks_are_recorded_where_they_are_watched(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [{"a": torch.randn(50, generator=generator)} for _ in range(4)]
    gradients[2] = gradients[1]
    optimizer = ds_vrgd.LAMB([torch.nn.Parameter(torch.ones(2))], watch="log")
    engine = SimpleNamespace(basic_optimizer=optimizer, optimizer=optimizer)
    assert ranks_record(engine) is None  # before the first step
    assert optimizer.recorder is not None
    optimizer.recorder.report = ds_vrgd.RankReport.of_gradients(gradients)
    optimizer.recorder._act(ds_vrgd.RankWatch().update(optimizer.recorder.report))
    monitor = Monitor()
    log = RunLog(tmp_path, 0, monitor, MONITORED)
    for step in (1, 2):
        log.made({"step": step, "loss": 1.0, "lr": 0.1}, engine, 2)
    first, second = read_log(tmp_path)
    norms = torch.stack([of["a"].norm() for of in gradients])
    usual = norms.sort().values[1:3].mean()
    assert first["ranks"]["norm"] == pytest.approx((norms / usual).tolist(), rel=5e-3)
    assert first["ranks"]["ranks"] == [0, 1, 2, 3]
    (told,) = first["ranks"]["events"]
    assert "rank 1: identical" in told
    assert "events" not in second["ranks"]  # told once
    assert ("Ranks/norm_3", first["ranks"]["norm"][3], 1) in monitor.events
    optimizer.overflow = True  # the report is of the update before, the event is not
    optimizer.recorder._act([ds_vrgd.RankEvent(2, 1, "nonfinite", ("a",), 1.0)])
    for step in (3, 4):
        log.made({"step": step, "loss": 1.0, "lr": 0.1}, engine, 4)
    *_, third, fourth = read_log(tmp_path)
    assert third["ranks"].keys() == {"events"}
    assert "ranks" not in fourth
    unwatched = ds_vrgd.LAMB([torch.nn.Parameter(torch.ones(2))])
    assert ranks_record(SimpleNamespace(basic_optimizer=unwatched, optimizer=unwatched)) is None


@pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")
def test_record_of_an_update_and_of_its_layers(tmp_path: Path) -> None:
    engine = Engine()
    found, stats = gsnr_record(engine), ds_vrgd.gsnr_stats(engine)
    assert found is not None
    assert (found["k"], found["batch"]) == (4, 8)
    mean = sum(layer.mean_ratio for layer in stats.layers.values()) / 2
    assert found["mean_ratio"] == pytest.approx(mean)
    assert (found["noise_low"], found["noise_high"]) == ds_vrgd.clamped_by_noise(4, 0.2)
    few = gsnr_record(Engine(3))
    assert few is not None
    assert few["k"] == 3
    assert not few.keys() & {"noise_low", "noise_high"}
    assert found["noise_trace"] / found["noise_signal"] == pytest.approx(ds_vrgd.noise_scale(engine))
    written = RunLog(tmp_path, 0, Monitor(), MONITORED)
    for step in range(1, 601):  # every third of 600 updates
        written.layers(step, 600, engine)
    names, *records = read_log(tmp_path)
    assert names == {"step": 1, "layer_names": ["a", "b"]}
    assert [one["step"] for one in records] == [*range(1, 601, 3)]
    first = records[0]["layers"]
    assert first["gsnr"] == [float(f"{layer.mean_ratio:.3g}") for layer in stats.layers.values()]
    assert sum(first["trace"]) == pytest.approx(found["noise_trace"], rel=5e-3)
    assert sum(first["signal"]) == pytest.approx(found["noise_signal"], abs=5e-3 * max(map(abs, first["signal"])))
    # a log that goes on does not name them again
    RunLog(tmp_path, 4, Monitor(), MONITORED).layers(5, 5, engine)
    assert [sorted(one) for one in read_log(tmp_path)] == [["layer_names", "step"]] + 3 * [["layers", "step"]]


@pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")
def test_update_that_was_skipped_has_no_record() -> None:
    engine = Engine()
    engine.optimizer.overflow = True  # what it holds is of the update before
    assert gsnr_record(engine) is None
    assert layers_record(engine) is None


def test_monitors_get_the_noise_scale_of_the_whole_log(tmp_path: Path) -> None:
    whole, resumed = Monitor(), Monitor()
    (tmp_path / "whole").mkdir()
    log = RunLog(tmp_path / "whole", 0, whole, MONITORED)
    for step in range(1, 13):
        log.update(record(step))
    (tmp_path / "resumed").mkdir()
    shutil.copy(tmp_path / "whole" / "log.jsonl", tmp_path / "resumed")
    log = RunLog(tmp_path / "resumed", 8, resumed, MONITORED)
    for step in range(9, 13):
        log.update(record(step))
    assert resumed.events == [event for event in whole.events if event[2] > 8]
    last = {name: value for name, value, step in resumed.events if step == 12}
    assert last["NoiseScale/batch"] == 64
    weights = [0.99 ** (12 - step) for step in range(1, 13)]
    top = sum(weight * (3.0 + step % 2) for step, weight in enumerate(weights, start=1))
    bottom = sum(weight * 0.01 * step for step, weight in enumerate(weights, start=1))
    assert last["NoiseScale/value"] == pytest.approx(top / bottom, rel=1e-12)
    assert last["NoiseScale/low"] < last["NoiseScale/value"] < last["NoiseScale/high"]
    # two updates set no upper bound
    assert "NoiseScale/high" not in {name for name, _, step in whole.events if step == 2}
