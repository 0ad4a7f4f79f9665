"""A NaN in one layer of one chunk of one rank: named, and nothing of its window stays, in every engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd.doctor.reference import DenseOptimizer
from tests.engines.deepspeed.cases import ENGINES, identify
from tests.support.logs import Log
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import (
    DTYPES,
    Case,
    build,
    chunk_gradients,
    master_weights,
    reference_groups,
    relative_error,
    whole_weights,
)

WORLD, ACCUMULATION, STEPS = 2, 2, 3
SPOILED = {"skip": 1, "error": 0}  # 0: nothing has been measured and no state counted yet
FOUND = "rank 1, micro-batch 2 of the window: NaN in 'positions.weight'"


def cases() -> Iterator[tuple[str, Case, bool]]:
    """Yield (id, case, whether DeepSpeed's own check for overflow is off)."""
    for policy in ("skip", "error"):
        base = Case("VRLAMB", 0, "fp32", ACCUMULATION, nonfinite=policy)
        for stage, dtype, accum_dtype in ENGINES:
            case = replace(base, stage=stage, dtype=dtype, accum_dtype=accum_dtype)
            for reduction in ("auto", "observe") if stage else ("auto",):
                if dtype != "fp16":
                    yield f"{identify(case)}-{reduction}-{policy}", replace(case, reduction=reduction), False
        for reduction in ("auto", "observe"):
            case = replace(base, stage=2, dtype="bf16", reduction=reduction)
            yield f"{identify(case)}-unchecked-{reduction}-{policy}", case, True
            for stage, of_vectors in product((1, 2), ({}, {"gamma": 1.0})):  # DeepSpeed forms no norm to go by
                unmeasured = {"compute_grad_norm": False}
                case = replace(base, stage=stage, reduction=reduction, of_vectors=of_vectors, zero=unmeasured)
                more = "-group with gamma 1" if of_vectors else ""
                yield f"{identify(case)}-no norm{more}-{reduction}-{policy}", case, False

    for stage in (1, 2, 3):  # the mean alone
        for optimizer, arguments in (("LAMB", {}), ("VRLAMB", {"gamma": 1.0})):
            case = Case(optimizer, stage, "bf16", ACCUMULATION, arguments=arguments)
            yield f"{identify(case)}-skip", case, False


def everything_of(engine: Any) -> dict[str, Tensor]:
    """Return copies of the weights, the masters and the optimizer's state; padding may hold anything, so as numbers."""
    optimizer = engine.basic_optimizer
    with whole_weights(engine) as weights:
        found = dict(weights)
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for index, tensor in enumerate(tensors):
        found[f"master {index}"] = tensor
        found |= {f"{key} {index}": value for key, value in optimizer.state[tensor].items()}
    return {name: tensor.detach().nan_to_num().clone() for name, tensor in found.items()}


def train(rank: int, case: Case, unchecked: bool) -> dict[str, Any]:
    config = case.config(WORLD)
    if unchecked:
        config["bf16"]["check_grad_overflow"] = False
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10**6, "warmup_max_lr": 5e-3}}
    config["scheduler"]["params"]["warmup_min_lr"] = 5e-3
    log = Log()
    logging.getLogger("ds_vrgd").addHandler(log)
    engine = build(case, WORLD, config)
    spoiling = [False]

    def spoil(module: Any, inputs: Any, output: Tensor) -> None:
        if spoiling[0]:
            output.register_hook(lambda grad: grad * float("nan"))

    engine.module.positions.register_forward_hook(spoil)
    plain = make_model().to(engine.device, DTYPES[case.dtype])
    start = {name: weight.cpu().double() for name, weight in plain.named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    answer: dict[str, Any] = {"error": "", "where": ""}
    spoiled = SPOILED[case.nonfinite]
    for step in range(STEPS):
        tokens = [t.to(engine.device) for t in batches(step, ACCUMULATION * WORLD)]
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        if step != spoiled:
            reference.step(chunk_gradients(plain, tokens, 1.0 / ACCUMULATION))
        before = everything_of(engine)
        for index in range(ACCUMULATION):
            spoiling[0] = (step, rank, index) == (spoiled, 1, 1)
            engine.backward(engine(tokens[index * WORLD + rank]))
            try:
                engine.step()
            except FloatingPointError as raised:
                answer["error"], answer["where"] = str(raised), step
        if step == spoiled:
            # state that a first step had made would be zeros
            after = everything_of(engine)
            same = [torch.equal(before.get(name, torch.zeros_like(now)), now) for name, now in after.items()]
            answer["unchanged"] = set(before) <= set(after) and all(same)
            answer["overflow"] = engine.optimizer.overflow
    answer |= {
        "skipped": engine.skipped_steps,
        "scheduled": engine.lr_scheduler.last_batch_iteration + 1,
        "counts": sorted({float(state["step"]) for state in engine.basic_optimizer.state.values()}),
        "log": log.lines,
        "distance": relative_error(master_weights(engine), reference),
    }
    logging.getLogger("ds_vrgd").removeHandler(log)
    engine.destroy()
    return answer


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    return {name: train(rank, case, unchecked) for name, case, unchecked in cases()}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, dict[str, Any]]]:
    return run_on_ranks(WORLD, train_all)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, case, _ in cases()], ids=[n for n, _, _ in cases()])
def test_one_layer_of_one_chunk(runs: list[dict[str, dict[str, Any]]], name: str, case: Case) -> None:
    policy = case.nonfinite
    for rank, run in enumerate(answer[name] for answer in runs):
        assert run["unchanged"]
        assert run["overflow"]
        assert run["skipped"] == 1
        assert run["counts"] == [STEPS - 1]
        assert run["scheduled"] == STEPS - 1
        told = [line for line in run["log"] if "not finite" in line]
        if policy == "error":
            assert run["where"] == SPOILED[policy]
            assert FOUND + ")" in run["error"], run["error"]
            assert not told
        else:
            assert run["error"] == ""
            assert [line.endswith(FOUND) for line in told] == ([True] if rank == 0 else []), told
    # what follows is as if the window had never been
    assert runs[0][name]["distance"] <= 8e-7
