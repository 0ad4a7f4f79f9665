"""The doctor's settings, given a user's JSON."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger

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
        ((12, 4, None), 2, (16, 4, 2)),  # for one rank or three
    ],
)
def test_batch_sizes_fit_the_ranks(given: tuple[Any, ...], world: int, expected: tuple[int, ...]) -> None:
    config = VRLAMB | {key: value for key, value in zip(SIZES, given, strict=True) if value is not None}
    settings = prepare(config, world, "cpu")
    assert tuple(settings.config[key] for key in SIZES) == expected
    changed = [key for key, old, new in zip(SIZES, given, expected, strict=True) if old != new]
    assert [text.partition(":")[0] for text in settings.changes] == changed


def test_automatic_values_are_resolved_and_reported() -> None:
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
        ValueError, match=r"tensor_parallel\.autotp_size=2: the doctor compares every rank with a whole"
    ):
        prepare(VRLAMB | {"tensor_parallel": {"autotp_size": 2}}, 4, "cpu")
    prepare(VRLAMB | {"tensor_parallel": {"autotp_size": 1}}, 4, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((10, 4, 2), "train_batch_size=10 is no multiple of .*gpu=4 x gradient_accumulation_steps=2, so no number"),
        ((7, 4, None), "train_batch_size=7 is no multiple of train_micro_batch_size_per_gpu=4, so"),
        ((9, "auto", 2), "train_batch_size=9 is no multiple of gradient_accumulation_steps=2, so"),
        ((0, None, None), "train_batch_size=0: give a whole number from 1 on"),
        ((None, -4, None), "train_micro_batch_size_per_gpu=-4: give a whole number"),
        ((None, None, 2.5), r"gradient_accumulation_steps=2\.5: give a whole number"),
        (("16", None, None), "train_batch_size='16': give a whole number"),
        ((True, None, None), "train_batch_size=True: give a whole number"),
    ],
)
def test_batch_that_no_number_of_ranks_has_is_refused(given: tuple[Any, ...], message: str) -> None:
    config = VRLAMB | {key: value for key, value in zip(SIZES, given, strict=True) if value is not None}
    with pytest.raises(ValueError, match=message):
        prepare(config, 2, "cpu")


#: What is added to the JSON, and what must be said. DeepSpeed passes over the first ones, and raises for the others.
FAULTY: dict[str, tuple[dict[str, Any], str]] = {
    "top": ({"zero_optimisation": {"stage": 2}}, '"zero_optimisation" is no key .* did you mean "zero_optimization"'),
    "top, too": ({"gradient_cliping": 0.1}, '"gradient_cliping" is no key .* did you mean "gradient_clipping"'),
    "case": ({"BF16": {"enabled": True}}, '"BF16" is no key .* did you mean "bf16"'),
    "hyphen": ({"train-batch-size": 8}, 'did you mean "train_batch_size"'),
    "optimizer": ({"optimizer": {"type": "VRLAMB", "parms": {}}}, 'did you mean "optimizer.params"'),
    "data_types": ({"data_types": {"grad_acum_dtype": "fp32"}}, 'did you mean "data_types.grad_accum_dtype"'),
    "checkpoint": ({"checkpoint": {"load_universel": True}}, 'did you mean "checkpoint.load_universal"'),
    "autocast": ({"torch_autocast": {"enabeld": True}}, 'did you mean "torch_autocast.enabled"'),
    "model": ({"zero_optimization": {"overlap_com": True}}, 'overlap_com" is no key .* did you mean "overlap_comm"'),
    "alias": ({"zero_optimization": {"stage3_max_live_params": 1}}, 'did you mean "stage3_max_live_parameters"'),
    "inner": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memry": True}}},
        'zero_optimization.offload_optimizer.pin_memry" is no key .* did you mean "pin_memory"',
    ),
    "fp16": ({"fp16": {"los_scale": 0}}, 'fp16.los_scale" is no key .* did you mean "loss_scale"'),
    "stage": ({"zero_optimization": {"stage": "two"}}, r"zero_optimization\.stage='two': Input should be 0, 1, 2"),
    "stage 4": ({"zero_optimization": {"stage": 4}}, r"zero_optimization\.stage=4: Input should be"),
    "enabled": ({"bf16": {"enabled": "perhaps"}}, r"bf16\.enabled='perhaps': Input should be a valid boolean"),
    "section": ({"zero_optimization": "stage 2"}, "zero_optimization='stage 2': DeepSpeed needs an object"),
    "null": ({"fp16": None}, "fp16=None: DeepSpeed needs an object"),
    "list": ({"optimizer": []}, r"optimizer=\[\]: DeepSpeed needs an object"),
    "params": ({"optimizer": {"type": "VRLAMB", "params": None}}, r"optimizer\.params=None: DeepSpeed needs"),
    "both": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        r"fp16\.enabled=true and bf16\.enabled=true: set one of them to false",
    ),
    "removed": ({"elasticity": {"enabled": False}}, "DeepSpeed cannot read .* Elastic training has been removed"),
    "removed, too": ({"amp": {"enabled": True}}, "DeepSpeed cannot read .* Apex AMP integration has been removed"),
    "data type": ({"communication_data_type": "bf"}, "DeepSpeed cannot read .* Invalid communication_data_type"),
    "reduction": ({"gradient_allreduce_op": "max"}, "DeepSpeed cannot read .*gradient_allreduce_op"),
    "schedule": ({"scheduler": {"type": "WarmupLr"}}, r'scheduler\.type="WarmupLr" .* did you mean "WarmupLR"'),
    "no schedule": ({"scheduler": {"type": "Poly"}}, r'scheduler\.type="Poly" .* give one of LRRangeTest, '),
    "schedule's argument": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        r"scheduler\.params\.warmup_steps: WarmupLR has no such argument",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_misspelt_key_or_an_impossible_value_is_named(name: str) -> None:
    change, message = FAULTY[name]
    with pytest.raises(ValueError, match=message):
        prepare(VRLAMB | change, 2, "cpu")


def test_reading_the_file_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table alone is the doctor's standard output, and DeepSpeed logs there that a key is deprecated."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    config = VRLAMB | {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    prepare(config, 2, "cpu")
    assert told == []
    DeepSpeedZeroConfig(**config["zero_optimization"])
    assert len(told) == 1


def test_several_faults_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)zero_optimisation.*overlap_com") as caught:
        prepare(VRLAMB | {"zero_optimisation": {}, "zero_optimization": {"overlap_com": True}}, 2, "cpu")
    assert str(caught.value).count("\n  - ") == 2


def test_other_unknown_keys_are_a_warning() -> None:
    settings = prepare(VRLAMB | {"comment": "ours", "_note": 1, "sequence_parallel_size": 1}, 2, "cpu")
    assert len(settings.warnings) == 1
    assert settings.warnings[0].startswith('"comment" is no key of DeepSpeed')
    assert "did you mean" not in settings.warnings[0]


def test_every_documented_section_passes() -> None:
    """Every section in DeepSpeed's own documentation of its JSON is known."""
    config = VRLAMB | {
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "disable_allgather": False,
        "dataloader_drop_last": True,
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "profile": False},
        "aio": {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True},
        "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1, "detailed": True},
        "comms_logger": {"enabled": False, "verbose": False},
        "checkpoint": {"tag_validation": "WARN", "load_universal": False, "use_node_local_storage": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5, "offload_param": {"device": "none"}},
    }
    assert prepare(config, 2, "cpu").warnings == []
