"""What the doctor makes of a user's JSON."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from ds_vrgd.doctor.settings import prepare

VRLAMB: dict[str, Any] = {"optimizer": {"type": "VRLAMB", "params": {"lr": 4e-3}}}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((None, None, None), 2, (16, 4, 2)),
        (("auto", "auto", "auto"), 2, (16, 4, 2)),
        ((48, 8, 3), 2, (48, 8, 3)),
        ((None, 8, 3), 2, (48, 8, 3)),
        ((48, 8, None), 2, (48, 8, 3)),
        ((48, None, 3), 2, (48, 8, 3)),
        ((1536, 8, 3), 2, (48, 8, 3)),  # for 64 GPUs
        ((65536, 4, None), 2, (512, 4, 64)),  # 8192 micro-batches
        ((7, 4, None), 2, (16, 4, 2)),
    ],
)
def test_batch_sizes_fit_the_ranks(given: tuple[Any, ...], world: int, expected: tuple[int, ...]) -> None:
    config = VRLAMB | {key: value for key, value in zip(SIZES, given, strict=True) if value is not None}
    settings = prepare(config, world, "cpu")
    assert tuple(settings.config[key] for key in SIZES) == expected
    changed = [key for key, old, new in zip(SIZES, given, expected, strict=True) if old != new]
    assert [text.partition(":")[0] for text in settings.changes] == changed


def test_automatic_values_are_resolved_and_told() -> None:
    config = {
        "optimizer": {"type": "VR-LAMB", "params": {"lr": "auto", "betas": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 5}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_clipping": "auto",
    }
    before = copy.deepcopy(config)
    settings = prepare(config, 2, "cuda")
    assert config == before
    assert settings.optimizer == "VRLAMB"
    assert settings.config["optimizer"]["params"] == {"eps": 1e-6}
    assert settings.config["zero_optimization"] == {"stage": 3}
    assert (settings.config["bf16"], settings.config["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert settings.config["gradient_clipping"] == 1.0
    assert "scheduler" not in settings.config
    told = "\n".join(settings.changes)
    for part in ("scheduler", "optimizer.params.lr: auto", "bf16.enabled: auto -> true", "reduce_bucket_size: auto"):
        assert part in told
    assert prepare(config, 2, "cpu").config["bf16"] == {"enabled": False}


def test_own_schedule_is_kept_and_monitors_are_not() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    settings = prepare(VRLAMB | {"scheduler": schedule, "wandb": {"enabled": True}}, 2, "cpu")
    assert settings.config["scheduler"] == schedule
    assert "wandb" not in settings.config
    assert "wandb: left out here" in settings.changes


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("AdamW", 'set it to "VRAdamW"'),
        ("Adam", 'set it to "VRAdam"'),
        ("vrlamb", 'set it to "VRLAMB"'),
        ("Muon", "set it to the nearest of ours"),
    ],
)
def test_optimizer_of_others_is_nothing_to_check(name: str, way_out: str) -> None:
    with pytest.raises(ValueError, match=f'optimizer.type="{name}" is not an optimizer of ds_vrgd') as caught:
        prepare({"optimizer": {"type": name}}, 2, "cpu")
    assert way_out in str(caught.value)


def test_config_without_optimizer_is_nothing_to_check() -> None:
    with pytest.raises(ValueError, match=r'names no optimizer.* add "optimizer"'):
        prepare({"zero_optimization": {"stage": 2}}, 2, "cpu")


def test_single_chunk_is_refused_unless_nothing_is_reduced() -> None:
    config = VRLAMB | {"gradient_accumulation_steps": 1}
    with pytest.raises(ValueError, match="gradient_accumulation_steps=1 on 1 rank is k = 1 chunk"):
        prepare(config, 1, "cpu")
    prepare(config, 2, "cpu")
    prepare(config | {"optimizer": {"type": "LAMB"}}, 1, "cpu")
    prepare(config | {"optimizer": {"type": "VRLAMB", "params": {"gamma": 1.0}}}, 1, "cpu")


def test_a_model_that_would_be_cut_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"tensor_parallel\.autotp_size=2: the doctor holds every rank against a whole"
    ):
        prepare(VRLAMB | {"tensor_parallel": {"autotp_size": 2}}, 4, "cpu")
    prepare(VRLAMB | {"tensor_parallel": {"autotp_size": 1}}, 4, "cpu")
