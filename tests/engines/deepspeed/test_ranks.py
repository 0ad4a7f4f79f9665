"""DeepSpeed: the ranks side by side are those of a dense computation at every stage, and a faulty rank is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch

import ds_vrgd
from ds_vrgd.doctor.weights import whole_weights
from tests.support.model import batches, make_model
from tests.support.rank_faults import AFTER, BEFORE, FAULTY, Data, check, follow, perceptron
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import DTYPES, Case, build

WORLD, ACCUMULATION = 4, 2
WATCH = {"watch": "log"}
CASES = {
    "stage 1, LAMB, bf16": Case("LAMB", 1, "bf16", ACCUMULATION, arguments=WATCH),
    "stage 2": Case("VRLAMB", 2, "fp32", ACCUMULATION, arguments=WATCH),
    "stage 3, gamma = 1": Case("VRAdam", 3, "fp32", ACCUMULATION, arguments={**WATCH, "gamma": 1.0}),
    "stage 2, two nodes": Case("VRLAMB", 2, "fp32", ACCUMULATION, arguments=WATCH, ranks_per_node=2),
    "stage 3, two nodes": Case("VRLAMB", 3, "fp32", ACCUMULATION, arguments=WATCH, ranks_per_node=2),
}
FAULTS = ("none", "same batch", "half in a layer", "zero in a layer", "NaN")
NAMES = ("norms", "distances", "gaps")


def error(report: ds_vrgd.RankReport, squares: dict[str, torch.Tensor], layers: tuple[str, ...]) -> float:
    """Return the largest relative error of a report."""
    rows = [report.layers.index(name) for name in layers]
    errors = [
        (getattr(report, name)[rows] - square.sqrt()).abs().max() / square.max().sqrt()
        for name, square in squares.items()
    ]
    return float(torch.stack(errors).max())


def reported(rank: int, case: Case) -> dict[str, Any]:
    """Return how far the report of the second step is from the dense gradients, and what it is about."""
    engine = build(case, WORLD)
    for step in range(2):
        tokens = [t.to(engine.device) for t in batches(step, ACCUMULATION * WORLD)]
        with whole_weights(engine) as found:
            weights = {name: weight.detach().clone() for name, weight in found.items()}
        for index in range(ACCUMULATION):
            engine.backward(engine(tokens[index * WORLD + rank]))
            engine.step()
    report = ds_vrgd.rank_report(engine)
    engine.destroy()
    plain = make_model().to(engine.device, DTYPES[case.dtype])
    plain.load_state_dict(weights, strict=False)
    gradients: list[list[dict[str, torch.Tensor]]] = []
    for index in range(ACCUMULATION):
        gradients.append([])
        for peer in range(WORLD):
            plain.zero_grad()
            plain(tokens[index * WORLD + peer]).backward()
            gradients[-1].append({name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None})
    size = case.ranks_per_node or WORLD
    first = rank // size * size
    parts = [ds_vrgd.RankReport.of_gradients(found[first : first + size]) for found in gradients]
    right = {name: torch.stack([getattr(part, name).square() for part in parts]).mean(0) for name in NAMES}
    answer = {
        "error": error(report, right, parts[0].layers), "ranks": report.ranks, "step": report.step,
        "expected": tuple(range(first, first + size)),
    }  # fmt: skip
    if report.nodes is not None:
        chunks = [[of[peer] for of in gradients for peer in range(node, node + size)] for node in range(0, WORLD, size)]
        means = [
            {name: torch.stack([c[name].double() for c in of_node]).mean(0) for name in of_node[0]}
            for of_node in chunks
        ]
        nodes = ds_vrgd.RankReport.of_gradients(means)
        right = {name: getattr(nodes, name).square() for name in NAMES}
        answer |= {"error of nodes": error(report.nodes, right, nodes.layers), "nodes": report.nodes.ranks}
    return answer


def engine_of(model: Any, told: list[Any], stage: int, **arguments: Any) -> Any:
    optimizer = ds_vrgd.VRAdam(model.parameters(), **{"lr": 3e-3, "watch": told.append, **arguments})
    config = {
        "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(rank: int) -> Callable[[Data, list[Any]], Callable[[int], None]]:
    def begin(data: Data, told: list[Any]) -> Callable[[int], None]:
        engine = engine_of(perceptron(), told, 2)

        def step_of(step: int) -> None:
            engine.module.up.edit = data.edit(step)
            inputs = [part.to(engine.device) for part in data.batch(step, WORLD)]
            engine.backward(engine(*inputs))
            engine.step()
            if told or step == BEFORE + AFTER - 1:
                engine.destroy()

        return step_of

    return begin


def with_other_weights(rank: int) -> list[Any]:
    """Return what is told of a rank whose weights are those of the first step again: its updates get lost."""
    told: list[Any] = []
    data, model = Data("none", rank), perceptron()
    engine = engine_of(model, told, 1, lr=2e-2)
    first = [p.detach().clone() for p in model.parameters()]
    for step in range(BEFORE + AFTER):
        if rank == FAULTY and step >= BEFORE:  # every step gathers them anew
            for p, old in zip(model.parameters(), first, strict=True):
                p.data.copy_(old)
        engine.backward(engine(*[part.to(engine.device) for part in data.batch(step, WORLD)]))
        engine.step()
        if told:
            break
    engine.destroy()
    return [(event.step - BEFORE + 1, event.rank, event.fault, event.layers, event.peers) for event in told]


def refusals(rank: int) -> dict[str, str]:
    found = {}
    for name, case in {
        "observe": Case("VRLAMB", 2, "fp32", 2, arguments=WATCH, reduction="observe"),
        "stage 0": Case("LAMB", 0, "fp32", 2, arguments=WATCH),
        "offload": Case("VRLAMB", 2, "fp32", 2, arguments=WATCH, zero={"offload_optimizer": {"device": "cpu"}}),
    }.items():
        try:
            build(case, WORLD)
        except ValueError as raised:
            found[name] = str(raised)
    return found


def everything(rank: int) -> dict[str, Any]:
    logging.getLogger("ds_vrgd").setLevel("ERROR")
    found: dict[str, Any] = {name: reported(rank, case) for name, case in CASES.items()}
    found |= {fault: follow(train(rank), fault, rank) for fault in FAULTS}
    return found | {"weights": with_other_weights(rank), "refusals": refusals(rank)}


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, everything)


@pytest.mark.parametrize("name", CASES)
def test_a_report_is_that_of_the_dense_gradients(runs: list[dict[str, Any]], name: str) -> None:
    for found in runs:
        of = found[name]
        assert of["error"] < 1e-6
        assert of["ranks"] == of["expected"]
        assert of["step"] == 1
        if CASES[name].ranks_per_node:
            assert of["error of nodes"] < 1e-6
            assert of["nodes"] == (0, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_rank_is_named(runs: list[dict[str, Any]], fault: str) -> None:
    for found in runs:
        assert found[fault] == runs[0][fault]
    check(fault, runs[0][fault])


def test_a_rank_with_other_weights_is_named(runs: list[dict[str, Any]]) -> None:
    steps, rank, fault, *_ = runs[0]["weights"][0]
    assert rank == FAULTY, runs[0]["weights"]
    # Where it is told within a few steps, it is by the layer that stands out first.
    assert fault in ("wrong", "drifted", "scaled"), runs[0]["weights"]
    assert 1 <= steps <= AFTER


def test_what_cannot_be_compared_is_refused_with_the_way_out(runs: list[dict[str, Any]]) -> None:
    for found in runs:
        of = found["refusals"]
        assert 'reduction="observe". Leave it out' in of["observe"]
        assert "Use stage 1, 2 or 3" in of["stage 0"]
        assert "Remove that section" in of["offload"]
        assert all("watch='log'" in text and "leave watch out" in text for text in of.values())
