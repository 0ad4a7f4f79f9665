"""``ds-vrgd plan``: micro-batch, accumulation, k, memory and hours of a pre-training run."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ds_vrgd_cli import add_json
from ds_vrgd_recipes.installed import CONFIGS, config_path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="what a pre-training run needs on a number of GPUs",
        description="Micro-batch, accumulation, k and memory of every phase of a BERT run file on N GPUs; with the "
        "speed of one GPU, as `python -m benchmarks.pretraining` measures it, also the hours. Memory is an estimate "
        "for bf16. Needs no GPU.",
    )
    parser.add_argument(
        "--run", type=config_path, required=True, dest="run_file", help="run file, such as configs/demo.yaml"
    )
    parser.add_argument("--gpus", type=int, required=True, help="data-parallel ranks")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="look for the largest micro-batch that fits")
    parser.add_argument(
        "--deepspeed_config",
        "--config",
        type=config_path,
        default=CONFIGS / "ds_vrgd.json",
        metavar="JSON",
        help="optimizer and ZeRO stage (default: the installed ds_vrgd.json)",
    )
    parser.add_argument(
        "--sequences-per-second",
        type=float,
        nargs="+",
        metavar="SPEED",
        help="of one GPU, one per phase: for the hours",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan; return 2 if the input has none."""
    from ds_vrgd.optim.optimizer import FEW_CHUNKS
    from ds_vrgd_recipes.bert.plan import GB, plan
    from ds_vrgd_recipes.bert.runfile import load_run_file
    from ds_vrgd_recipes.run.errors import InputError
    from ds_vrgd_recipes.run.launch import load_deepspeed_config

    try:
        if options.gpus < 1 or min(options.sequences_per_second or [1]) <= 0 or (options.gpu_memory or 1) <= 0:
            raise InputError("--gpus, --gpu-memory and --sequences-per-second must be positive")
        config = load_deepspeed_config(options.deepspeed_config)
        memory = None if options.gpu_memory is None else options.gpu_memory * GB
        found = plan(load_run_file(options.run_file), config, options.gpus, memory, options.sequences_per_second)
    except InputError as error:
        kind = _other_kind(options.run_file)
        wrong = f"--run {options.run_file} is a run file of {kind}. Give one of BERT: ds-vrgd plan knows no others"
        print(f"error: {wrong if kind else error}", file=sys.stderr)
        return 2
    if options.json:
        options.result = json.dumps([_as_dict(number, one) for number, one in enumerate(found, start=1)], indent=2)
        return 0
    header = ["phase", "sequence", "updates", "global batch", "micro-batch", "accumulation", "k", "GB a GPU", "hours"]
    rows = [
        [
            f"{number}",
            f"{one.phase.sequence_length}",
            f"{one.phase.steps:,}",
            f"{one.phase.global_batch:,}",
            f"{one.micro_batch}",
            f"{one.accumulation}",
            f"{one.chunks:,}",
            f"{one.bytes_at_peak / GB:.0f}",
            "?" if one.hours is None else f"{one.hours:.1f}",
        ]
        for number, one in enumerate(found, start=1)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    if all(one.hours is not None for one in found):
        print(f"{sum(one.hours or 0 for one in found):.1f} hours on {options.gpus} GPUs")
    for number, one in enumerate(found, start=1):
        if one.chunks < FEW_CHUNKS:
            print(f"phase {number}: k = {one.chunks}; the paper found k in [32, 256] best: halve the micro-batch")
    return 0


def _other_kind(path: Path) -> str | None:
    """Return what a run file trains if it is not BERT; None if it is not a run file of that either."""
    for kind, module in (("DLRM", "clicks"), ("a residual network", "vision")):
        with contextlib.suppress(ValueError, ModuleNotFoundError):
            import_module(f"ds_vrgd_recipes.{module}.runfile").load_run_file(path)
            return kind
    return None


def _as_dict(number: int, one: Any) -> dict[str, Any]:
    return {
        "phase": number,
        "sequence_length": one.phase.sequence_length,
        "updates": one.phase.steps,
        "global_batch": one.phase.global_batch,
        "micro_batch": one.micro_batch,
        "accumulation": one.accumulation,
        "k": one.chunks,
        "bytes_per_gpu": one.bytes_at_peak,
        "hours": one.hours,
    }
