"""``ds-vrgd plan``: micro-batch, accumulation, k, memory and hours of a pre-training run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="what a pre-training run needs on a number of GPUs",
        description="Micro-batch, accumulation, k and memory of every phase of a BERT run file on N GPUs; with the "
        "speed of one GPU, as `python -m benchmarks.pretraining` measures it, also the hours. Memory is an estimate "
        "for bf16. Needs no GPU.",
    )
    parser.add_argument("--run", type=Path, required=True, dest="run_file", help="run file, such as configs/demo.yaml")
    parser.add_argument("--gpus", type=int, required=True, help="data-parallel ranks")
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="look for the largest micro-batch that fits")
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        default=Path("configs/ds_vrgd.json"),
        help="optimizer and ZeRO stage (%(default)s)",
    )
    parser.add_argument(
        "--sequences-per-second", type=float, nargs="+", metavar="SPEED", help="of one GPU, one a phase: for the hours"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan; 1 if there is none."""
    from ds_vrgd.bert.plan import GB, plan
    from ds_vrgd.bert.runfile import load_run_file
    from ds_vrgd.optim.base import FEW_CHUNKS
    from ds_vrgd.training.errors import InputError
    from ds_vrgd.training.launch import load_deepspeed_config

    try:
        if options.gpus < 1 or min(options.sequences_per_second or [1]) <= 0 or (options.gpu_memory or 1) <= 0:
            raise InputError("--gpus, --gpu-memory and --sequences-per-second must be positive")
        config = load_deepspeed_config(options.deepspeed_config)
        memory = None if options.gpu_memory is None else options.gpu_memory * GB
        found = plan(load_run_file(options.run_file), config, options.gpus, memory, options.sequences_per_second)
    except InputError as error:
        print(f"ds-vrgd plan: {error}", file=sys.stderr)
        return 1
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
