"""One release of DeepSpeed, case by case: run by scripts/compatibility.py, a process for each release."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.engines.deepspeed.cases import NEUTRAL, all_cases, identify
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import Case, Result, run_cases

WORLD = 2
#: One that every configuration of tests/engines/deepspeed/cases.py has, and one each of the other kinds.
OPTIMIZERS = ("VRLAMB", "VRSGD", "LAMB")


@dataclass(frozen=True)
class Outcome:
    """The :class:`Result` of one case without its statistics, or what was raised."""

    wrapper: str = ""
    of_weights: float = 0.0
    of_distance: float = 0.0
    moved: float = 0.0
    of_mean: float | None = None
    error: str = ""


def cases() -> Iterator[tuple[str, Case]]:
    """Yield the cases of cases.py with two ranks, and those in which a release's own mean was found wrong."""
    for world, name, case in all_cases():
        if world == WORLD and case.optimizer in OPTIMIZERS and not case.compiled:
            yield name, case
    # Without GSNR the optimizer takes the mean that DeepSpeed hands over.
    for note, stages, zero in NEUTRAL:
        for stage in stages:
            case = Case("LAMB", stage, "fp32", 4, zero=zero)
            yield identify(case, note), case
    offloads: tuple[dict[str, Any], ...] = ({}, {"offload_optimizer": {"device": "cpu"}})
    for optimizer, stage, dtype, zero in product(("LAMB", "VRLAMB"), (1, 2, 3), ("fp16", "bf16"), offloads):
        if (stage, dtype, zero) != (1, "bf16", {}):  # in the table already
            case = Case(optimizer, stage, dtype, 4, "fp32", zero=zero)
            yield identify(case, "offload_accumulation" if zero else "accumulation"), case


def run_all(rank: int, world: int, mine: list[Case]) -> list[Outcome]:
    """Run the cases one by one."""
    return [outcome(run_cases(rank, world, [case])[0]) for case in mine]


def outcome(result: Result | str | None) -> Outcome:
    """Return what is kept of a result; ranks other than the first have none."""
    if isinstance(result, Result):
        return Outcome(result.wrapper, result.of_weights, result.of_distance, result.moved, result.of_mean)
    return Outcome(error=result or "")


def measure() -> dict[str, Any]:
    """Run all cases under the DeepSpeed that is imported, and return what ``json`` can write."""
    mine = dict(cases())
    outcomes = run_on_ranks(WORLD, run_all, WORLD, list(mine.values()))[0]
    where = "CPU, gloo" if DEVICE == "cpu" else f"{WORLD} x {torch.cuda.get_device_name()}, NCCL"
    return {
        "DeepSpeed": deepspeed.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "where": where,
        "outcomes": {name: asdict(found) for name, found in zip(mine, outcomes, strict=True)},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=1), encoding="utf-8")
