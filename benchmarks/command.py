"""The command that measures: ``python -m benchmarks --ranks 2 --output results``."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from benchmarks.bert import NETWORKS
from benchmarks.contenders import CONTENDERS
from benchmarks.plan import ACCUMULATIONS, STAGES, Configuration, configurations
from benchmarks.ranks import Rank, run_on_ranks
from benchmarks.record import PARTS, Record, environment, file_name

DESCRIPTION = """Measure collectives, kernels and whole training steps side by side, and write results/run-<time>.json
after every figure. On GPUs if there are any; otherwise a tiny model on the CPU shows that everything runs."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the arguments of the command; models become a mapping from name to micro-batch."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser("python -m benchmarks", description=DESCRIPTION)
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="processes, a GPU each; all GPUs, or 2 on the CPU")
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"), help="folder (out/benchmarks)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts of the run")
    default = ["large", "base"] if gpus else ["tiny"]
    parser.add_argument(
        "--models",
        nargs="+",
        choices=NETWORKS,
        default=default,
        help="the first has its collectives and kernels measured",
    )
    parser.add_argument("--stages", nargs="+", type=int, choices=sorted(STAGES), default=list(STAGES))
    parser.add_argument("--accumulations", nargs="+", type=int, default=list(ACCUMULATIONS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--micro-batch", type=int, help="sequences a rank, instead of each model's own")
    parsed = parser.parse_args(arguments)
    if parsed.ranks < 1 or min(parsed.accumulations) < 1 or (parsed.micro_batch or 1) < 1:
        parser.error("--ranks, --accumulations and --micro-batch must be at least 1")
    return parsed


def command_line(arguments: list[str], module: str = "benchmarks") -> str:
    """Return the command as it was given, without the folder, which does not influence the figures."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--output" and not argument.startswith("--output="):
            kept.append(argument)
        skip = argument == "--output"
    return " ".join([f"python -m {module}", *kept])


def measure_parts(rank: Rank, chosen: argparse.Namespace, command: str, path: Path) -> None:
    """Measure collectives and kernels on every rank."""
    from benchmarks import collectives, kernels

    record = Record(path if rank.is_first else None, environment(command, rank.count, rank.device))
    if "collectives" in chosen.only and rank.count > 1:
        collectives.run(rank, record, chosen.models[0])
    if "kernels" in chosen.only:
        kernels.run(rank, record, chosen.models[0])


def measure_steps(rank: Rank, wanted: list[Configuration], command: str, path: Path) -> None:
    """Training steps: what every rank does."""
    from benchmarks import steps

    steps.run(rank, Record(path if rank.is_first else None, environment(command, rank.count, rank.device)), wanted)


def without_leftovers(wanted: list[Configuration]) -> list[list[Configuration]]:
    """Cut the configurations into groups that one process may measure.

    Stage 3 replaces ``torch.nn.functional.linear`` for good, by a function in Python that doubles the host's time for a
    forward pass: whatever the same process measured after it would be slower than it is.
    """
    return [list(group) for _, group in itertools.groupby(wanted, key=lambda configuration: configuration.stage == 3)]


def main(arguments: list[str]) -> int:
    """Measure and say where the results are."""
    chosen = parse(arguments)
    path = chosen.output / file_name()
    command = command_line(arguments)
    status = 0
    try:
        if chosen.only != ["steps"]:
            status = run_on_ranks(chosen.ranks, measure_parts, chosen, command, path)
        if "steps" in chosen.only:
            models = {name: chosen.micro_batch or NETWORKS[name].micro_batch for name in chosen.models}
            wanted = configurations(models, chosen.stages, chosen.accumulations, chosen.contenders, chosen.ranks)
            for group in without_leftovers(wanted):
                status = status or run_on_ranks(chosen.ranks, measure_steps, group, command, path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if path.exists():
        print(f"results in {path}; python -m benchmarks.report {chosen.output} writes them to docs/MEASUREMENTS.md")
    return status
