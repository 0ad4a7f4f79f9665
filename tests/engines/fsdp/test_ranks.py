"""FSDP2: the ranks side by side are those of a dense computation, and a rank with a fault is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ds_vrgd
from ds_vrgd.optim import VROptimizer
from tests.engines.fsdp.training import Case, sharded
from tests.support.logs import Log
from tests.support.model import batches, make_model, param_groups
from tests.support.rank_faults import FAULTS, Data, check, follow, perceptron
from tests.support.ranks import DEVICE, run_on_ranks

ACCUMULATION = 2
QUICK = ("none", "same batch", "half in a layer", "zero in a layer", "NaN")
REST = tuple(fault for fault in FAULTS if fault not in QUICK)
REPORTED = {
    "VRLAMB": Case("VRLAMB", "fp32", 4, ACCUMULATION),
    "LAMB": Case("LAMB", "fp32", 4, ACCUMULATION),
    "gamma = 1, the model alone": Case("VRAdam", "fp32", 4, ACCUMULATION, blocks=(), arguments={"gamma": 1.0}),
    "two copies": Case("VRLAMB", "fp32", 2, ACCUMULATION, replicas=2),
}


def dense(weights: dict[str, torch.Tensor], tokens: list[torch.Tensor]) -> list[ds_vrgd.RankReport]:
    """Return the reports of the micro-batches of a window, whose ranks are in ``tokens`` in turn."""
    plain = make_model().to(DEVICE)
    plain.load_state_dict(weights, strict=False)
    ranks, reports = len(tokens) // ACCUMULATION, []
    for index in range(ACCUMULATION):
        found = []
        for rank in range(ranks):
            plain.zero_grad()
            plain(tokens[index * ranks + rank].to(DEVICE)).backward()
            found.append({name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None})
        reports.append(ds_vrgd.RankReport.of_gradients(found))
    return reports


def difference(report: ds_vrgd.RankReport, window: list[ds_vrgd.RankReport]) -> float:
    """Return the largest relative error of a report on a window."""
    rows, errors = [report.layers.index(name) for name in window[0].layers], []
    for name in ("norms", "distances", "gaps"):
        right = (torch.stack([getattr(of, name).square() for of in window]).mean(0)).sqrt()
        errors.append((getattr(report, name)[rows] - right).abs().max() / right.abs().max())
    right = torch.stack([of.deviations for of in window]).amax(0)
    errors.append((report.deviations[rows] - right).abs().max() / right.max().clamp(min=1.0))  # of two ranks it is 0
    return float(torch.stack(errors).max())


def reported(rank: int, case: Case) -> dict[str, Any]:
    model = sharded(case)
    optimizer = getattr(ds_vrgd, case.optimizer)(param_groups(model), lr=1e-2, watch="log", **case.arguments)
    ds_vrgd.attach(model, optimizer)
    shard = rank % case.ranks
    for step in range(2):
        tokens = batches(step, ACCUMULATION * case.world)
        weights = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for index in range(ACCUMULATION):
            model(tokens[index * case.world + rank].to(DEVICE)).div(ACCUMULATION).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = ds_vrgd.rank_report(optimizer)
    mine = [tokens[i * case.world + rank - shard + r] for i in range(ACCUMULATION) for r in range(case.ranks)]
    optimizer.observer.detach()
    return {"error": difference(report, dense(weights, mine)), "ranks": report.ranks, "step": report.step}


def train(rank: int, ranks: int) -> Callable[[Data, list[Any]], Callable[[int], None]]:
    def begin(data: Data, told: list[Any]) -> Callable[[int], None]:
        model, mesh = perceptron().to(DEVICE), init_device_mesh(DEVICE, (ranks,))
        for block in (model.up, model):
            fully_shard(block, mesh=mesh)
        optimizer = ds_vrgd.VRAdam(model.parameters(), lr=3e-3, watch=told.append)
        ds_vrgd.attach(model, optimizer)

        def step_of(step: int) -> None:
            model.up.edit = data.edit(step)
            loss = model(*(part.to(DEVICE) for part in data.batch(step, ranks)))
            (loss * data.loss_factor(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step_of

    return begin


def everything(rank: int, ranks: int, faults: list[str]) -> dict[str, Any]:
    logging.getLogger("ds_vrgd").setLevel("ERROR")
    found: dict[str, Any] = {fault: follow(train(rank, ranks), fault, rank) for fault in faults}
    if ranks == 4 and "none" in faults:
        found |= {f"report of {name}": reported(rank, case) for name, case in REPORTED.items()}
        found["policies"] = policies(rank)
    return found


def policies(rank: int) -> dict[str, Any]:
    """Return what is logged and raised where two ranks have the same data."""
    log, found = Log(), {}
    logging.getLogger("ds_vrgd").setLevel("WARNING")
    logging.getLogger("ds_vrgd").addHandler(log)
    for policy in ("log", "error", None):
        model = make_model().to(DEVICE)
        fully_shard(model, mesh=init_device_mesh(DEVICE, (4,)))
        optimizer: VROptimizer = ds_vrgd.LAMB(model.parameters(), lr=1e-2, watch=policy)
        ds_vrgd.attach(model, optimizer)
        model(batches(0, 4)[max(rank, 1)].to(DEVICE)).backward()
        try:
            optimizer.step()
        except ds_vrgd.RankError as raised:
            found["raised"] = str(raised), raised.events[0].rank
        if policy is None:
            found["nothing"] = optimizer.recorder is None and optimizer.observer.comparison is None
        optimizer.observer.detach()
    logging.getLogger("ds_vrgd").removeHandler(log)
    return found | {"logged": log.lines}


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_on_ranks(4, everything, 4, list(QUICK))


@pytest.fixture(scope="module")
def rest() -> list[dict[str, Any]]:
    return run_on_ranks(4, everything, 4, list(REST))


@pytest.fixture(scope="module")
def eight() -> list[dict[str, Any]]:
    return run_on_ranks(8, everything, 8, list(FAULTS))


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_is_that_of_the_dense_gradients(four: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(four):
        of = found[f"report of {name}"]
        assert of["error"] < 1e-6
        first = rank - rank % REPORTED[name].ranks
        assert of["ranks"] == tuple(range(first, first + REPORTED[name].ranks))
        assert of["step"] == 1


def same_on_all(runs: list[dict[str, Any]], fault: str) -> None:
    for found in runs:
        assert found[fault] == runs[0][fault]
    check(fault, runs[0][fault])


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_on_one_of_four_ranks_is_named(four: list[dict[str, Any]], fault: str) -> None:
    same_on_all(four, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", REST)
def test_every_fault_on_one_of_four_ranks_is_named(rest: list[dict[str, Any]], fault: str) -> None:
    same_on_all(rest, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_of_eight_ranks_is_named(eight: list[dict[str, Any]], fault: str) -> None:
    same_on_all(eight, fault)


def test_what_is_seen_is_logged_once_or_raised(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        of = found["policies"]
        told = [line for line in of["logged"] if "identical" in line]
        assert len(told) == (rank == 0), told
        assert all("LAMB: step 0, rank 0: identical" in line and "rank 1" in line for line in told)
        message, first = of["raised"]
        assert "identical" in message
        assert "docs/RANKS.md" in message
        assert first == 0
        assert of["nothing"]


def on_two(rank: int) -> dict[str, Any]:
    import warnings

    model = make_model().to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(DEVICE, (2,)))
    told: list[ds_vrgd.RankEvent] = []
    optimizer = ds_vrgd.VRLAMB(model.parameters(), lr=1e-2, watch=told.append)
    ds_vrgd.attach(model, optimizer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(3):
            model(batches(step, 2)[0 if step == 2 else rank].to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
    model(batches(3, 2)[rank].to(DEVICE)).backward()
    model.up.weight.grad = None  # type: ignore[assignment]
    optimizer.step()
    report = ds_vrgd.rank_report(optimizer)
    return {
        "norms": {name: float(report.norms[report.layers.index(name)].amin()) for name in ("up.weight", "down.weight")},
        "warned": [str(w.message) for w in warned if "to compare" in str(w.message)],
        "told": [(event.step, event.fault, event.rank, event.peers) for event in told],
    }


def test_two_ranks_are_not_compared_but_found_identical() -> None:
    for rank, found in enumerate(run_on_ranks(2, on_two)):
        assert found["norms"]["up.weight"] == 0.0, "it was thrown away before the step"
        assert found["norms"]["down.weight"] > 0.0
        assert found["told"] == [(2, "identical", 0, (1,))]
        assert len(found["warned"]) == (rank == 0)
        assert all("2 ranks to compare, and of fewer than 4 none" in text for text in found["warned"])
