"""The buckets and buffers that are held while gradients travel."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import deepspeed
import pytest
import torch

import ds_vrgd  # noqa: F401 - its import makes the JSON's name known
from tests.support.ranks import run_on_ranks

BLOCKS, WIDTH = 24, 16


def deep_model() -> torch.nn.Sequential:
    """Return many layers with biases and normalisation, as an encoder has."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)) for _ in range(BLOCKS)]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 1))


def exchange(rank: int) -> list[dict[str, Any]]:
    """Run one backward pass at stages 1, 2 and 3, with biases and normalisation in a param group of their own."""
    answers = []
    for stage in (1, 2, 3):
        model = deep_model()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 600},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        engine.backward(engine(torch.randn(2, WIDTH, device=engine.device)).square().mean())
        moments = engine.basic_optimizer.observer._moments
        order = [engine.param_names[route.param] for bucket in moments._buckets for route in bucket.routes]
        buffers = sum(len(spare) for spare in moments._spare.values())
        answers.append({"order": order, "buckets": len(moments._buckets), "buffers": buffers})
        engine.destroy()
    return answers


@pytest.fixture(scope="module")
def answers() -> list[dict[str, Any]]:
    return run_on_ranks(2, exchange)[0]


def test_buckets_follow_the_model_and_not_the_param_groups(answers: list[dict[str, Any]]) -> None:
    names = [name for name, _ in deep_model().named_parameters()]
    for answer in answers:
        places = [names.index(name) for name in answer["order"]]
        assert all(later < earlier for earlier, later in pairwise(places))


def test_a_few_buffers_serve_all_buckets(answers: list[dict[str, Any]]) -> None:
    """Two exchanges under way have two buffers each, the one that starts has two, and the next that fills one."""
    for answer in answers:
        assert answer["buckets"] > 10
        assert answer["buffers"] <= 7
