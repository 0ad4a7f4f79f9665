"""What one release of DeepSpeed gives, case by case: run by scripts/compatibility.py, a process for each release."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_vrgd.zero import refusals
from ds_vrgd.zero.compat import defects
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import Case, Result, run_cases
from tests.zero.cases import NEUTRAL, all_cases, identify

WORLD = 2
#: One that every configuration of tests/zero/cases.py has, and one each of the other kinds.
OPTIMIZERS = ("VRLAMB", "VRSGD", "LAMB")
#: Runs of one case at stage 3 as the release does it, to see whether it computes with weights that are not all there.
REPEATED = Case("LAMB", 3, "fp32", 4)
REPEATS = 30


@dataclass(frozen=True)
class Outcome:
    """Of one case: a :class:`Result` without its statistics, or what was raised.

    Attributes:
        refused: why ``ds_vrgd`` refuses this case under this release; it was run all the same.
    """

    wrapper: str = ""
    of_weights: float = 0.0
    of_distance: float = 0.0
    moved: float = 0.0
    of_mean: float | None = None
    error: str = ""
    refused: str = ""


def cases() -> Iterator[tuple[str, Case]]:
    """Those of tests/zero/cases.py with two ranks, and those in which DeepSpeed's own mean was found wrong."""
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


def run_noting(rank: int, world: int, mine: list[Case]) -> list[Outcome]:
    """Run the cases, also those that would be refused because of the release."""
    noted: list[str] = []

    def note(engine: Any) -> list[str]:
        noted.extend(defects(engine))
        return []

    refusals.defects = note
    wait_for_gathers()
    outcomes = []
    for case in mine:
        noted.clear()
        result = run_cases(rank, world, [case])[0]
        outcomes.append(replace(outcome(result), refused="; ".join(noted)))
    return outcomes


def wait_for_gathers() -> None:
    """Have each all-gather waited for, which stage 3 neglects before 0.19.8: else nothing more could be told of it."""
    from deepspeed.runtime.zero import partition_parameters

    for home, name in (
        (deepspeed.comm, "all_gather"),
        (deepspeed.comm, "all_gather_into_tensor"),
        (partition_parameters, "_dist_allgather_fn"),
    ):
        setattr(home, name, waiting(getattr(home, name)))


def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
    def complete(*args: Any, **kwargs: Any) -> Any:
        handle = collective(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return complete


def run_repeatedly(rank: int, world: int) -> list[Outcome]:
    """One case at stage 3 many times over, as the release does it."""
    refusals.defects = lambda engine: []
    return [outcome(result) for result in run_cases(rank, world, [REPEATED] * REPEATS)]


def outcome(result: Result | str | None) -> Outcome:
    """What is kept of a result; ranks other than the first have none."""
    if isinstance(result, Result):
        return Outcome(result.wrapper, result.of_weights, result.of_distance, result.moved, result.of_mean)
    return Outcome(error=result or "")


def measure() -> dict[str, Any]:
    """All cases under the DeepSpeed that is imported; what ``json`` can write."""
    mine = dict(cases())
    outcomes = run_on_ranks(WORLD, run_noting, WORLD, list(mine.values()))[0]
    repeats = run_on_ranks(WORLD, run_repeatedly, WORLD)[0]
    where = "CPU, gloo" if DEVICE == "cpu" else f"{WORLD} x {torch.cuda.get_device_name()}, NCCL"
    return {
        "DeepSpeed": deepspeed.__version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "where": where,
        "repeats": [asdict(found) for found in repeats],
        "outcomes": {name: asdict(found) for name, found in zip(mine, outcomes, strict=True)},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure(), indent=1), encoding="utf-8")
