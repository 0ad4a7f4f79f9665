"""What is filled into DeepSpeed's JSON, and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_vrgd.training import launch
from ds_vrgd.training.errors import InputError
from ds_vrgd.training.launch import Batches, configure_cpu_ranks, fill_deepspeed_config, load_deepspeed_config

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIMIZER = {"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}}}
RUN = [Batches(16, 2, "phase 1"), Batches(24, 2, "phase 2")]


def filled(config: dict[str, Any], run: list[Batches], ranks: int = 2) -> dict[str, Any]:
    return fill_deepspeed_config(config, run, 0, ranks, Path("out"))


def test_batch_sizes_and_monitors_come_from_the_run() -> None:
    given = {**OPTIMIZER, "train_batch_size": "auto"}
    config = filled(given, RUN)
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4  # 16 / (2 x 2 ranks)
    assert config["tensorboard"] == {"enabled": True, "output_path": "out", "job_name": "tensorboard"}
    assert config["csv_monitor"] == {"enabled": True, "output_path": "out", "job_name": "csv"}
    assert given == {**OPTIMIZER, "train_batch_size": "auto"}  # the caller's is untouched


def test_own_monitors_are_kept() -> None:
    assert filled({**OPTIMIZER, "csv_monitor": {"enabled": False}}, RUN)["csv_monitor"] == {"enabled": False}


@pytest.mark.parametrize("device, enabled", [("cpu", False), ("cuda", True)])
def test_automatic_bf16(monkeypatch: pytest.MonkeyPatch, device: str, enabled: bool) -> None:
    monkeypatch.setattr(launch.get_accelerator(), "device_name", lambda: device)
    assert filled({**OPTIMIZER, "bf16": {"enabled": "auto"}}, RUN)["bf16"] == {"enabled": enabled}


def test_contradicting_batch_sizes_are_refused_in_every_phase() -> None:
    with pytest.raises(
        InputError, match="train_batch_size=8 in the DeepSpeed JSON contradicts global_batch=16 in phase 1"
    ):
        filled({**OPTIMIZER, "train_batch_size": 8}, RUN)
    with pytest.raises(InputError, match=r"train_batch_size=16 .* global_batch=24 in phase 2 .* \"auto\""):
        filled({**OPTIMIZER, "train_batch_size": 16}, RUN)
    assert filled({**OPTIMIZER, "train_micro_batch_size_per_gpu": 2}, RUN)["train_micro_batch_size_per_gpu"] == 2


def test_global_batch_must_be_divisible() -> None:
    with pytest.raises(InputError, match="global_batch=16 is not a multiple of micro_batch=2 x ranks=3"):
        filled(OPTIMIZER, RUN, ranks=3)


def test_single_chunk_is_refused_unless_nothing_is_reduced() -> None:
    single = [Batches(each.global_batch, each.global_batch, each.phase) for each in RUN]
    with pytest.raises(InputError, match=r"phase 1: global_batch=16 .* k = 1 chunk, .* set gamma=1.0"):
        filled(OPTIMIZER, single, ranks=1)
    filled({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gamma": 1.0}}}, single, ranks=1)
    filled({"optimizer": {"type": "LAMB", "params": {"lr": 1e-3}}}, single, ranks=1)


def test_a_run_without_phases_is_not_told_of_them() -> None:
    with pytest.raises(InputError, match=r"^global_batch=16 in one micro_batch=16 on one rank is k = 1 chunk"):
        filled(OPTIMIZER, [Batches(16, 16)], ranks=1)
    with pytest.raises(InputError, match="contradicts global_batch=16 in the run file; remove"):
        filled({**OPTIMIZER, "train_batch_size": 8}, [Batches(16, 2)])


def test_shipped_json_loads() -> None:
    assert load_deepspeed_config(CONFIGS / "ds_vrgd.json")["optimizer"]["type"] == "VRLAMB"


@pytest.mark.parametrize(
    "content, expected",
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "names no optimizer"),
        (json.dumps({**OPTIMIZER, "scheduler": {"type": "WarmupLR"}}), 'remove "scheduler" from the JSON'),
    ],
)
def test_unusable_json(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "ds.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=expected):
        load_deepspeed_config(tmp_path / "ds.json")


def test_absent_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_deepspeed_config(tmp_path / "absent.json")


def test_cpu_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", True)
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda process: range(6))
    monkeypatch.setenv("LOCAL_SIZE", "4")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(launch.get_accelerator(), "device_name", lambda: "cuda")
    configure_cpu_ranks()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is True
    monkeypatch.setattr(launch.get_accelerator(), "device_name", lambda: "cpu")
    configure_cpu_ranks()
    assert deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] is False
    assert threads == [1]  # 6 cores for 4 ranks
