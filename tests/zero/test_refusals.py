"""What cannot be exact is refused before any training, and the message says what to change."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

import ds_vrgd
from ds_vrgd.zero import refusals
from tests.support.model import make_model
from tests.support.ranks import run_on_ranks

#: What is added to the JSON, and what the message must contain.
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, ("fp16.enabled=true", "stage=0", "Use stage 1, 2 or 3, or bf16")),
    "fp16 autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "float16"}, "zero_optimization": {"stage": 2}},
        ("torch_autocast.dtype=float16", "bfloat16"),
    ),
    "DeepCompile": (
        {"compile": {"deepcompile": True}, "zero_optimization": {"stage": 2}},
        ("compile.deepcompile=true", "Set it to false"),
    ),
    "ZenFlow": (
        {
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": False},
            },
        },
        ("zero_optimization.zenflow", "Remove"),
    ),
    "SuperOffload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        ("super_offload=true", "Set it to false"),
    ),
    "partial offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        ("offload_optimizer.ratio=0.5", "Set it to 1.0"),
    ),
    "NVMe offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ("offload_optimizer.device=nvme", "Use cpu"),
    ),
    "NVMe offload of parameters": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}},
        ("offload_param.device=nvme", "Use cpu"),
    ),
    "bf16 masters": (
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            "zero_optimization": {"stage": 2},
        },
        ("bf16_master_weights_and_grads=true", "Set it to false"),
    ),
    "summed gradients": (
        {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2}},
        ("gradient_allreduce_op=sum", "mean"),
    ),
    "elastic checkpoint": (
        {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
        ("elastic_checkpoint=true", "Set it to false", "ds-vrgd to-universal"),
    ),
    "universal checkpoint at stage 0": (
        {"checkpoint": {"load_universal": True}},
        ("checkpoint.load_universal=true", "Set it to false"),
    ),
}


def attempt(config: dict[str, Any], model: torch.nn.Module | None = None, **optimizer: Any) -> str:
    """The error of building an engine, or "" if it was built."""
    base = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10**9}
    if not optimizer:
        base["optimizer"] = {"type": "VRLAMB", "params": {"lr": 1e-3}}
    model = model or make_model()
    parameters = [p for p in model.parameters() if p.requires_grad]
    try:
        deepspeed.initialize(model=model, model_parameters=parameters, config=base | config, **optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attempt_all(rank: int) -> dict[str, str]:
    errors = {name: attempt(config) for name, (config, _) in SETTINGS.items()}
    sparse = torch.nn.Sequential(torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 1))
    errors["sparse embedding"] = attempt({}, sparse)
    for name in ("VRLAMB", "VR-LAMB", "VR-SGD", "LAMB", "LARS"):
        errors[f"type {name}"] = attempt(
            {"optimizer": {"type": name, "params": {"lr": 1e-3}}, "bf16": {"enabled": True}}
        )
    errors["type vrlamb"] = attempt({"optimizer": {"type": "vrlamb", "params": {"lr": 1e-3}}})
    errors["unknown argument"] = attempt({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gama": 0.1}}})
    errors["bad argument"] = attempt({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gamma": 1.5}}})
    errors["class"] = attempt({"zero_optimization": {"stage": 3}}, optimizer=functools.partial(ds_vrgd.VRLAMB, lr=1e-3))
    two = attempt({"fp16": {"enabled": True}, "gradient_allreduce_op": "sum"})
    return errors | {"two at once": two, "compiled autograd": compile_autograd()}


def compile_autograd() -> str:
    """The error of asking an engine of ours for compiled autograd."""
    model = make_model()
    config = {"train_batch_size": 4, "optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}}}
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    try:
        engine.compile(compiled_autograd_enabled=True)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    return run_on_ranks(1, attempt_all)[0]


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_is_refused_by_name_with_the_way_out(errors: dict[str, str], name: str) -> None:
    assert errors[name].startswith("ValueError: VRLAMB cannot be exact under this configuration"), errors[name]
    for part in SETTINGS[name][1]:
        assert part in errors[name]


def test_every_refused_setting_is_listed_at_once(errors: dict[str, str]) -> None:
    assert "fp16.enabled=true" in errors["two at once"]
    assert "gradient_allreduce_op=sum" in errors["two at once"]


def test_sparse_embedding_is_refused_by_its_name(errors: dict[str, str]) -> None:
    assert "Embedding(sparse=True) at '0'" in errors["sparse embedding"]


@pytest.mark.parametrize("name", ["VRLAMB", "VR-LAMB", "VR-SGD", "LAMB", "LARS"])
def test_json_names_are_known_in_bf16_too(errors: dict[str, str], name: str) -> None:
    assert errors[f"type {name}"] == ""


def test_compiled_autograd_is_refused(errors: dict[str, str]) -> None:
    assert "compiled_autograd_enabled=True" in errors["compiled autograd"]
    assert "Leave it at False" in errors["compiled autograd"]


@pytest.mark.parametrize(
    ("device", "ranks", "stage", "after_stage_3", "compiled", "refused"),
    [
        ("cuda", 2, 3, False, True, True),
        ("cuda", 2, 3, False, False, False),
        ("cuda", 2, 2, False, True, False),
        ("cuda", 2, 2, True, True, True),
        ("cuda", 1, 3, True, True, False),
        ("cpu", 2, 3, True, True, False),
    ],
)
def test_compiled_model_is_refused_at_and_after_stage_3_on_several_accelerators(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    ranks: int,
    stage: int,
    after_stage_3: bool,
    compiled: bool,
    refused: bool,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    if after_stage_3:  # DeepSpeed leaves it in place
        monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if compiled:
        module[0].compile(backend="eager")  # a part is enough
    engine = SimpleNamespace(
        device=torch.device(device), module=module, compile=lambda: None, zero_optimization_stage=lambda: stage
    )
    monkeypatch.setattr(refusals, "REFUSALS", [refusals._compiled_model])
    several = (device, ranks) == ("cuda", 2) and (stage == 3 or after_stage_3)
    with pytest.raises(ValueError, match="with several accelerators") if refused else nullcontext():
        refusals.refuse_inexact(engine, "VRLAMB")
    refusals.guard_compile(engine)
    with pytest.raises(ValueError, match="with several accelerators") if several else nullcontext():
        engine.compile()


def test_factory_is_accepted(errors: dict[str, str]) -> None:
    assert errors["class"] == ""


def test_other_spelling_is_not_ours(errors: dict[str, str]) -> None:
    assert "vrlamb is not a supported DeepSpeed Optimizer" in errors["type vrlamb"]


def test_json_arguments_are_checked(errors: dict[str, str]) -> None:
    assert "VRLAMB has no argument gama=0.1" in errors["unknown argument"]
    assert "gamma=1.5 is out of range: must be in (0, 1]" in errors["bad argument"]
