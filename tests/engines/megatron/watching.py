"""The programs of the ranks for ``test_ranks.py``."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import ds_vrgd
from tests.engines.megatron.cases import Case, watched
from tests.engines.megatron.training import build, initialize, recorded

BEFORE, AFTER, FAULTY = 25, 10, 2
NAMES = ("norms", "distances", "gaps", "deviations")


def report(case: Case) -> dict[str, Any]:
    """Return how far a report is from what the ranks' buffers held."""
    with recorded() as mine:
        run = build(replace(case, arguments={**case.arguments, "watch": "log"}))
        for step in range(2):
            run.window(step)
            assert run.step()
    found = ds_vrgd.rank_report(run.optimizer.optimizer)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {run.names[param]: grad.float() for param, grad in mine.items()})
    right = ds_vrgd.RankReport.of_gradients(everyone)
    rows = [found.layers.index(name) for name in right.layers]
    errors = [
        (getattr(found, name)[rows] - value).abs().max() / value.abs().max()
        for name in NAMES
        for value in [getattr(right, name)]
    ]
    run.optimizer.optimizer.observer.detach()
    return {"error": float(torch.stack(errors).max()), "ranks": found.ranks, "layers": len(found.layers)}


def fault(case: Case) -> list[Any]:
    """Return what is told of a rank whose gradient of one layer is zero from a step on."""
    told: list[Any] = []
    run = build(replace(case, optimizer="VRAdam", arguments={"watch": told.append}))
    spoiled: Any = next(p for p, name in run.names.items() if name.endswith("linear_fc1.weight"))
    (group,) = [g for g in run.model.bucket_groups if any(spoiled in bucket.params for bucket in g.buckets)]
    start = group.start_grad_sync
    for step in range(BEFORE + AFTER):

        def spoil(*args: Any, active: bool = step >= BEFORE, **kwargs: Any) -> Any:
            if active and parallel_state.get_data_parallel_rank() == FAULTY:
                spoiled.main_grad.zero_()
            group.start_grad_sync = start  # whose place the exchange must find its own in
            return start(*args, **kwargs)

        group.start_grad_sync = spoil
        run.window(step)
        group.start_grad_sync = start
        assert run.step()
        if told:
            break
    run.optimizer.optimizer.observer.detach()
    return [(event.step - BEFORE + 1, event.rank, event.fault, event.layers) for event in told]


def everything(rank: int) -> dict[str, Any]:
    """Return the errors of all reports, and what is told of a fault."""
    logging.getLogger("ds_vrgd").setLevel("ERROR")
    warnings.simplefilter("ignore")
    initialize(1, 1)
    cases = watched()
    return {name: report(case) for name, case in cases.items()} | {"fault": fault(cases["VRLAMB"])}
