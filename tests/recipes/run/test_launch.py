"""What is filled into DeepSpeed's JSON, and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_vrgd_recipes.run import launch
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.launch import (
    Batches,
    configure_cpu_ranks,
    fill_deepspeed_config,
    load_deepspeed_config,
    without_launcher,
)
from ds_vrgd_recipes.run.settings import mathematics

CONFIGS = Path(__file__).parents[3] / "configs"
OPTIMIZER = {"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}}}
CHANGED: dict[str, Any] = {
    "gamma": 0.2,
    "weight_decay": 0.1,
    "betas": [0.5, 0.9],
    "beta3": 0.5,
    "eps": 1e-3,
    "gsnr_eps": 1e-3,
    "gsnr_dtype": "bfloat16",
    "trust_clip": [0, 10],
    "bias_correction": False,
    "prenormalize": True,
    "adapt": False,
    "reduction": "observe",
}
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
        ('{"optimizer": null}', r"optimizer=None is not an object; give {\.\.\.}"),
        (json.dumps({**OPTIMIZER, "bf16": True}), "bf16=True is not an object"),
        (json.dumps({**OPTIMIZER, "gradient_clipping": "auto"}), "gradient_clipping='auto' is not a number >= 0"),
        (json.dumps({**OPTIMIZER, "gradient_clipping": -1}), "gradient_clipping=-1 is not a number >= 0"),
        ('{"gradient_clipping": NaN}', "NaN is not a finite number"),
        ('{"gradient_clipping": 1e999}', "1e999 is not a finite number"),
        ("[" * 100_000, "is nested too deeply to be read"),
    ],
)
def test_unusable_json(tmp_path: Path, content: str, expected: str) -> None:
    (tmp_path / "ds.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=expected):
        load_deepspeed_config(tmp_path / "ds.json")


@pytest.mark.parametrize(
    "optimizer, expected",
    [
        ({"type": "VRLAMB", "params": {"lr": 1e-3, "weigth_decay": 0.1}}, "VRLAMB has no argument weigth_decay=0.1"),
        ({"type": "VR-LAMB", "params": {"lr": 1e-3, "gamma": 2}}, "gamma=2 is out of range"),
        ({"type": "LAMB", "params": {"lr": 1e-3, "gamma": 0.5}}, "LAMB has no argument gamma=0.5"),
        ({"type": "VRAdamW", "params": {"lr": 1e-3, "betas": [0.9, 1.0]}}, r"betas\[1\]=1.0 is out of range"),
        ({"type": "VRLAMB", "params": [1e-3]}, r"=\[0.001\] in the DeepSpeed JSON is not an object"),
    ],
)
def test_wrong_arguments_are_found_without_an_engine(optimizer: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=f"^optimizer.params.*{expected}"):
        filled({"optimizer": optimizer}, RUN)


def test_an_optimizer_without_arguments_has_the_defaults() -> None:
    for optimizer in ({"type": "VRLAMB"}, {"type": "VRLAMB", "params": None}, {"type": "VRLAMB", "params": {}}):
        assert filled({"optimizer": optimizer}, RUN)["train_batch_size"] == 16


def test_what_a_resumed_run_must_agree_on_has_every_argument_by_group() -> None:
    groups = ({}, {"weight_decay": 0.0, "adapt": False})
    config = {**OPTIMIZER, "zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    found = mathematics(config, 2, groups)
    assert json.loads(json.dumps(found)) == found
    spelled = {"lr": 3.0, "betas": (0.9, 0.999), "beta3": 0.9, "gamma": 0.1, "gsnr_dtype": "float32", "adapt": True}
    # The same run, spelt out; who reaches the ranks and what is done about a NaN may change.
    same = {"type": "VRLAMB", "params": {**spelled, "ranks_per_node": 2, "nonfinite": "error"}}
    assert mathematics({**config, "optimizer": same, "gradient_clipping": 0}, 2, groups) == found
    assert [group["weight_decay"] for group in found["optimizer_params"]] == [0.0, 0.0]
    changed = {name: {"type": "VRLAMB", "params": {"lr": 1.0, name: value}} for name, value in CHANGED.items()}
    for name, optimizer in changed.items():
        first, second = mathematics({**config, "optimizer": optimizer}, 2, groups)["optimizer_params"]
        assert first[name] != found["optimizer_params"][0][name]
        # the run's own group options stand before the JSON's arguments
        assert (second[name] == found["optimizer_params"][1][name]) == (name in ("weight_decay", "adapt"))
    for key, value in (
        ("bf16", {"enabled": True}), ("fp16", {"enabled": True, "loss_scale_window": 9}), ("gradient_clipping", 0.5),
        ("communication_data_type", "fp32"), ("zero_optimization", {"stage": 2, "zero_quantized_gradients": True}),
    ):  # fmt: skip
        assert mathematics({**config, key: value}, 2, groups) != found


def test_of_deepspeeds_own_optimizer_what_is_given_is_compared() -> None:
    adam = {"optimizer": {"type": "Adam", "params": {"lr": 1.0, "betas": [0.8, 0.9]}}}
    assert mathematics(adam, 1, ({}, {"weight_decay": 0.0}))["optimizer_params"] == [
        {"betas": [0.8, 0.9]},
        {"betas": [0.8, 0.9], "weight_decay": 0.0},
    ]


def test_absent_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_deepspeed_config(tmp_path / "absent.json")


def test_a_process_without_a_launcher_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, expected in (({}, "1"), ({"PMI_SIZE": "2"}, None), ({"RANK": "1"}, None)):
        environ = dict(variables)
        monkeypatch.setattr(launch.os, "environ", environ)
        without_launcher()
        assert environ.get("WORLD_SIZE") == expected
    monkeypatch.setattr(launch.os, "environ", alone := {})
    without_launcher()
    assert alone.keys() == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


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
