"""Ranks that disagree all get an error that names what differs when the engine is built; none is left waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from ds_vrgd.optim import VRLAMB
from tests.support.model import TinyLM, make_model, param_groups
from tests.support.ranks import run_on_ranks

WORLD = 2
PARAMS = {"lr": 1e-3, "weight_decay": 0.1}

Groups = list[dict[str, Any]]


def build(
    model: nn.Module | None = None,
    groups: Callable[[nn.Module], Groups] = param_groups,
    type: str = "VRLAMB",
    client: Any = None,
    accumulation: int = 2,
    stage: int = 2,
    **params: Any,
) -> Any:
    model = model or make_model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if client is None:
        config["optimizer"] = {"type": type, "params": PARAMS | params}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config, optimizer=client)
    return engine


def wider(rank: int) -> TinyLM:
    model = make_model()
    model.up = nn.Linear(13, 11 + rank)
    return model


def renamed(rank: int) -> TinyLM:
    model = make_model()
    if rank:
        model.above, model.up = model.up, nn.Identity()  # type: ignore[assignment]
    return model


def frozen(rank: int) -> TinyLM:
    model = make_model()
    model.up.bias.requires_grad_(rank == 0)
    return model


def halved(rank: int) -> TinyLM:
    model = make_model()
    return model.half() if rank else model


def reordered(rank: int) -> TinyLM:
    model = make_model()
    if rank:
        model.norm = model._modules.pop("norm")  # type: ignore[assignment]
    return model


def swapped(model: nn.Module, rank: int) -> Groups:
    groups = param_groups(model)
    if rank:
        groups[0]["params"].reverse()
    return groups


def one_group(model: nn.Module, rank: int) -> Groups:
    groups = param_groups(model)
    return groups if rank == 0 else [{"params": groups[0]["params"] + groups[1]["params"]}]


def with_option(model: nn.Module, rank: int) -> Groups:
    return param_groups(model, adapt=rank == 0)


def client(rank: int) -> Any:
    return functools.partial(VRLAMB, lr=1e-3 if rank else 2e-3)


#: What a rank builds, and the error on every rank.
CASES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "shape": (lambda r: {"model": wider(r)}, "'up.weight' is float32 (11, 13) on rank 0, float32 (12, 13) on rank 1"),
    "name": (lambda r: {"model": renamed(r)}, "'up.weight' is float32 (11, 13) on rank 0, missing on rank 1"),
    "frozen": (lambda r: {"model": frozen(r)}, "'up.bias' is float32 (11,) on rank 0, float32 (11,), frozen on rank 1"),
    "dtype": (lambda r: {"model": halved(r)}, "'tokens.weight' is float32 (83, 13) on rank 0, float16 (83, 13) on"),
    "order": (lambda r: {"model": reordered(r)}, "the ranks differ in what they train: the order of the parameters"),
    "accumulation": (lambda r: {"accumulation": 2 + r}, "gradient_accumulation_steps is 2 on rank 0, 3 on rank 1"),
    "stage": (lambda r: {"stage": 1 + r}, "zero_optimization.stage is 1 on rank 0, 2 on rank 1"),
    "class": (lambda r: {"type": ("VRLAMB", "VRAdam")[r]}, "the optimizer is VRLAMB on rank 0, VRAdam on rank 1"),
    "lr": (lambda r: {"lr": (1e-3, 2e-3)[r]}, "lr of param group 0 is 0.001 on rank 0, 0.002 on rank 1"),
    "betas": (lambda r: {"betas": (0.9, (0.99, 0.999)[r])}, "betas of param group 0 is (0.9, 0.99) on rank 0, (0.9"),
    "gamma": (lambda r: {"gamma": (1.0, 0.1)[r]}, "gamma of param group 0 is 1.0 on rank 0, 0.1 on rank 1"),
    "reduction": (lambda r: {"reduction": ("fused", "auto")[r]}, "reduction is 'fused' on rank 0, 'auto' on rank 1"),
    "gsnr_dtype": (lambda r: {"gsnr_dtype": ("float32", "bfloat16")[r]}, "gsnr_dtype of param group 0 is float32 on"),
    "ranks_per_node": (lambda r: {"ranks_per_node": 1 + r}, "ranks_per_node is 1 on rank 0, 2 on rank 1"),
    "nonfinite": (lambda r: {"nonfinite": ("skip", "error")[r]}, "nonfinite is 'skip' on rank 0, 'error' on rank 1"),
    "order in a group": (
        lambda r: {"groups": lambda model: swapped(model, r)},
        "'tokens.weight' is float32 (83, 13), number 0 of param group 0 on rank 0, float32 (83, 13), number 3 of param",
    ),
    "groups": (
        lambda r: {"groups": lambda model: one_group(model, r)},
        "the number of param groups is 2 on rank 0, 1 on rank 1",
    ),
    "option of a group": (
        lambda r: {"groups": lambda model: with_option(model, r)},
        "adapt of param group 1 is True on rank 0, False on rank 1",
    ),
    "factory": (lambda r: {"client": client(r)}, "lr of param group 0 is 0.002 on rank 0, 0.001 on rank 1"),
}  # fmt: skip


def errors(rank: int) -> dict[str, str]:
    found = {}
    for name, (arguments, _) in CASES.items():
        try:
            build(**arguments(rank)).destroy()
            found[name] = "no error"
        except RuntimeError as error:
            found[name] = str(error)
    return found


def same_under_other_spellings(rank: int) -> str:
    """Build with lists and tuples, whole numbers and floats, dtypes and their names, which are the same."""
    spelled = [{"betas": [0.9, 0.999], "weight_decay": 0, "gsnr_dtype": "float32"}]
    spelled += [{"betas": (0.9, 0.999), "weight_decay": 0.0, "gsnr_dtype": torch.float32}]
    build(client=functools.partial(VRLAMB, lr=1e-3, **spelled[rank])).destroy()
    return "built"


def everything(rank: int) -> tuple[dict[str, str], str]:
    return errors(rank), same_under_other_spellings(rank)


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, str], str]]:
    return run_on_ranks(WORLD, everything)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_what_differs(found: list[tuple[dict[str, str], str]], name: str) -> None:
    first, second = (errors[name] for errors, _ in found)
    assert first == second
    assert CASES[name][1] in first
    assert "on every rank" in first


def test_spelling_is_no_difference(found: list[tuple[dict[str, str], str]]) -> None:
    assert [built for _, built in found] == ["built", "built"]
