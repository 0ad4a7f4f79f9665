"""What one release of DeepSpeed gives, and the page that compares several: the work of scripts/compatibility.py."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, Result, run_cases
from tests.zero.cases import ENGINES, NEUTRAL, all_cases, identify

WORLD = 2


@dataclass(frozen=True)
class Outcome:
    """Of one case: a :class:`Result` without its statistics, or what was raised."""

    wrapper: str = ""
    of_weights: float = 0.0
    of_distance: float = 0.0
    moved: float = 0.0
    of_mean: float | None = None
    error: str = ""


def cases() -> Iterator[tuple[str, Case]]:
    """Those of tests/zero/cases.py with two ranks, and those in which DeepSpeed's own mean was found wrong."""
    for world, name, case in all_cases():
        if world == WORLD and not case.compiled:
            yield name, case
    base = Case("LAMB", 2, "fp32", 4)
    for note, stages, zero in NEUTRAL:
        for stage in stages:
            case = replace(base, stage=stage, zero=zero)
            yield identify(case, note), case
    for optimizer, engine, zero in product(
        ("LAMB", "VRLAMB"),
        ((1, "fp16"), (1, "bf16"), (2, "fp16"), (2, "bf16"), (3, "fp16"), (3, "bf16")),
        ({}, {"offload_optimizer": {"device": "cpu"}}),
    ):
        case = Case(optimizer, *engine, 4, "fp32", zero=zero)
        yield identify(case, "mixed_offload" if zero else "mixed"), case


def measure() -> dict[str, Any]:
    """All cases under the DeepSpeed that is imported; what ``json`` can write."""
    mine = dict(cases())
    results = run_on_ranks(WORLD, run_cases, WORLD, list(mine.values()))[0]
    return {
        "versions": {
            "DeepSpeed": deepspeed.__version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
        "outcomes": {name: asdict(outcome(result)) for name, result in zip(mine, results, strict=True)},
    }


def outcome(result: Result | str) -> Outcome:
    """What is kept of a result."""
    if isinstance(result, str):
        return Outcome(error=result)
    return Outcome(result.wrapper, result.of_weights, result.of_distance, result.moved, result.of_mean)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=1), encoding="utf-8")
