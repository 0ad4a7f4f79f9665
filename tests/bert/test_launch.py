"""What is filled into DeepSpeed's JSON, and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_vrgd.bert import launch
from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.launch import configure_cpu_ranks, fill_deepspeed_config, load_deepspeed_config
from ds_vrgd.bert.runfile import RunFile

CONFIGS = Path(__file__).parents[2] / "configs"
OPTIMIZER = {"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}}}


def filled(config: dict[str, Any], run: RunFile, ranks: int = 2) -> dict[str, Any]:
    return fill_deepspeed_config(config, run, run.phases[0], ranks, Path("out"))


def test_batch_sizes_and_monitors_come_from_the_run(run: RunFile) -> None:
    given = {**OPTIMIZER, "train_batch_size": "auto"}
    config = filled(given, run)
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4  # 16 / (2 x 2 ranks)
    assert config["tensorboard"] == {"enabled": True, "output_path": "out", "job_name": "tensorboard"}
    assert config["csv_monitor"] == {"enabled": True, "output_path": "out", "job_name": "csv"}
    assert given == {**OPTIMIZER, "train_batch_size": "auto"}  # the caller's is untouched


def test_own_monitors_are_kept(run: RunFile) -> None:
    assert filled({**OPTIMIZER, "csv_monitor": {"enabled": False}}, run)["csv_monitor"] == {"enabled": False}


@pytest.mark.parametrize("device, enabled", [("cpu", False), ("cuda", True)])
def test_automatic_bf16(run: RunFile, monkeypatch: pytest.MonkeyPatch, device: str, enabled: bool) -> None:
    monkeypatch.setattr(launch.get_accelerator(), "device_name", lambda: device)
    assert filled({**OPTIMIZER, "bf16": {"enabled": "auto"}}, run)["bf16"] == {"enabled": enabled}


def test_contradicting_batch_sizes_are_refused_in_every_phase(run: RunFile) -> None:
    with pytest.raises(
        InputError, match="train_batch_size=8 in the DeepSpeed JSON contradicts global_batch=16 in phase 1"
    ):
        filled({**OPTIMIZER, "train_batch_size": 8}, run)
    with pytest.raises(InputError, match=r"train_batch_size=16 .* global_batch=24 in phase 2 .* \"auto\""):
        filled({**OPTIMIZER, "train_batch_size": 16}, run)
    assert filled({**OPTIMIZER, "train_micro_batch_size_per_gpu": 2}, run)["train_micro_batch_size_per_gpu"] == 2


def test_global_batch_must_be_divisible(run: RunFile) -> None:
    with pytest.raises(InputError, match="global_batch=16 is not a multiple of micro_batch=2 x ranks=3"):
        filled(OPTIMIZER, run, ranks=3)


def test_single_chunk_is_refused_unless_nothing_is_reduced(run: RunFile) -> None:
    whole = [phase.model_copy(update={"micro_batch": phase.global_batch}) for phase in run.phases]
    single = run.model_copy(update={"phases": whole})
    with pytest.raises(InputError, match=r"phase 1: global_batch=16 .* k = 1 chunk, .* set gamma=1.0"):
        filled(OPTIMIZER, single, ranks=1)
    filled({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gamma": 1.0}}}, single, ranks=1)
    filled({"optimizer": {"type": "LAMB", "params": {"lr": 1e-3}}}, single, ranks=1)


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
