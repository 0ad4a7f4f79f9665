"""DistributedDataParallel: ranks that disagree are told so at the first step, and a NaN of one rank is everybody's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from ds_vrgd import gsnr_stats
from ds_vrgd.optim import VRLAMB, VRSGD, VRAdam
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks

WORLD = 2


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


#: What a rank's optimizer is made of, and what both ranks are told.
DIFFERENCES: dict[str, tuple[Callable[[int, nn.Module], Any], str]] = {
    "lr": (lambda r, m: VRSGD(named(m), lr=0.1 + r), "lr of param group 0 is 0.1 on rank 0, 1.1 on rank 1"),
    "class": (lambda r, m: (VRLAMB, VRAdam)[r](named(m)), "the optimizer is VRLAMB on rank 0, VRAdam on rank 1"),
    "policy": (
        lambda r, m: VRSGD(named(m), nonfinite=("skip", "error")[r]),
        "nonfinite is 'skip' on rank 0, 'error' on",
    ),
    "order": (
        lambda r, m: VRSGD(named(m)[:: (1, -1)[r]]),
        "'tokens.weight' is float32 (83, 13), number 0 of param group 0 on rank 0, float32 (83, 13), number 8 of param",
    ),
    "missing": (
        lambda r, m: VRSGD(named(m)[r:]),
        "'tokens.weight' is float32 (83, 13), number 0 of param group 0 on r",
    ),
}


def backward(wrapped: nn.Module, rank: int, spoiled: bool = False) -> None:
    """Two micro-batches; the second one's position table may be spoiled."""
    first, second = (batches(0, 4)[2 * index + rank] for index in range(2))
    with wrapped.no_sync():  # type: ignore[operator]
        wrapped(first).backward()
    positions = wrapped.module.positions.weight  # type: ignore[union-attr]
    loss = wrapped(second)
    (loss + (positions * float("nan")).sum() if spoiled else loss).backward()


def told(rank: int) -> dict[str, str]:
    found = {}
    for name, (build, _) in DIFFERENCES.items():
        model = make_model()
        optimizer = build(rank, model)
        backward(DistributedDataParallel(model), rank)
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        found[name] = str(raised.value)
    return found


def spoiled(rank: int, policy: str) -> dict[str, Any]:
    """Rank 1's second chunk of the second step is spoiled."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_vrgd").addHandler(handler)
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = VRLAMB(named(model), lr=0.01, nonfinite=policy)
    raised, weights = "", []
    for step in range(3):
        backward(wrapped, rank, spoiled=(step, rank) == (1, 1))
        try:
            optimizer.step()
        except FloatingPointError as error:
            raised = str(error)
        optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    logging.getLogger("ds_vrgd").removeHandler(handler)
    same = [all(torch.equal(a, b) for a, b in zip(weights[i], weights[i + 1], strict=True)) for i in range(2)]
    return {"raised": raised, "log": lines, "same": same, "sum": sum(float(w.double().sum()) for w in weights[-1])}


def primed(rank: int, *, by: int | None) -> tuple[list[torch.Tensor], int]:
    """Two steps, before which rank ``by`` alone has asked torch.distributed.checkpoint for the optimizer's state."""
    model = make_model()
    wrapped = DistributedDataParallel(model)
    optimizer = VRAdam(named(model), lr=0.01)
    if rank == by:
        get_optimizer_state_dict(wrapped, optimizer)
    for _ in range(2):
        backward(wrapped, rank)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()], gsnr_stats(optimizer).k


def everything(rank: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        primings = [primed(rank, by=by) for by in (None, WORLD - 1)]
        return {"told": told(rank), "skip": spoiled(rank, "skip"), "error": spoiled(rank, "error"), "primed": primings}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, everything)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_both_ranks_are_told_what_differs(found: list[dict[str, Any]], name: str) -> None:
    first, second = (answer["told"][name] for answer in found)
    assert first == second
    assert DIFFERENCES[name][1] in first
    assert "ZeroRedundancyOptimizer" in first


def test_one_rank_alone_may_ask_for_the_state_of_a_new_optimizer(found: list[dict[str, Any]]) -> None:
    # priming is a step to torch: it must wait for nobody, and leave no trace
    runs = [run for answer in found for run in answer["primed"]]
    assert all(k == 2 * WORLD for _, k in runs)
    for weights, _ in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(runs[0][0], weights, strict=True))


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_a_nan_of_one_rank_stops_all(found: list[dict[str, Any]], policy: str) -> None:
    where = "rank 1, micro-batch 2 of the window: NaN in 'positions.weight'"
    for rank, answer in enumerate(found):
        run = answer[policy]
        assert run["same"] == [True, False]
        assert (where in run["raised"]) == (policy == "error")
        assert len(run["log"]) == (policy == "skip" and rank == 0)
        assert all(where in line for line in run["log"])
    assert found[0][policy]["sum"] == found[1][policy]["sum"]
