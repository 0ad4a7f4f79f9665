"""``ds-vrgd doctor``: is training exact under this DeepSpeed configuration? Can these nodes train together?"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from functools import partial
from pathlib import Path

DESCRIPTION = """\
Train a small model for some steps under a DeepSpeed configuration, compare its weights with a dense float64 reference,
and print a table for a bug report. The ranks are started here, unless a launcher (deepspeed, torchrun, srun, mpirun)
has done so. With --cluster, compare the nodes of all ranks that a launcher has started; without a launcher, check this
one alone.
"""
STATUS = """\
exit status: 0 exact; 1 not exact, or a rank failed or hung; 2 the configuration is refused or cannot be read, or its
optimizer is none of ds_vrgd. With --cluster: 0 ready, 1 not ready
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor", help="check that training is exact under a configuration", description=DESCRIPTION, epilog=STATUS
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--deepspeed_config", "--config", type=Path, metavar="JSON", help="DeepSpeed's configuration")
    what.add_argument("--cluster", action="store_true", help="check the nodes before a run, instead of a configuration")
    parser.add_argument(
        "--world", type=_positive, metavar="N", help="ranks to start (default: the GPUs, else 2 on CPU)"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="your own model: a function that returns (model, batches), where batches(step, index) is a tuple or dict "
        "of the model's arguments, and the model returns its loss, or something with .loss (default: a tiny "
        "transformer)",
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="with --cluster: where the run will write (default: here)"
    )
    parser.add_argument("--free", type=float, metavar="GB", help="with --cluster: what must be free there (default: 1)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def run(options: argparse.Namespace) -> int:
    """Check; returns the exit status."""
    stray = ("world", "model", "steps") if options.cluster else ("output", "free")
    for name in stray:
        if getattr(options, name) is not None:
            other = "--deepspeed_config" if options.cluster else "--cluster"
            print(f"error: --{name} says nothing here; it goes with {other}", file=sys.stderr)
            return 2
    return _check_cluster(options) if options.cluster else _check_configuration(options)


def _check_cluster(options: argparse.Namespace) -> int:
    from ds_vrgd.doctor.cluster import check_cluster, join
    from ds_vrgd.doctor.ranks import run_as_rank
    from ds_vrgd.doctor.table import render
    from ds_vrgd.zero.launchers import adopt_launcher

    try:
        launched = adopt_launcher()
    except ValueError as error:
        print(f"error: {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return 1
    output, least_free = options.output or Path(), 1e9 if options.free is None else options.free * 1e9
    if launched:
        outcome = run_as_rank(partial(check_cluster, alone=False), output, least_free, join=join)
    else:
        outcome = check_cluster(output, least_free, alone=True)
    if os.environ.get("RANK", "0") == "0":
        print(render(outcome.rows), flush=True)
    return outcome.status


def _check_configuration(options: argparse.Namespace) -> int:
    from deepspeed.accelerator import get_accelerator

    from ds_vrgd.doctor.environment import stale_locks, versions
    from ds_vrgd.doctor.examine import NOT_EXACT, REFUSED, Outcome, examine
    from ds_vrgd.doctor.ranks import RankFailed, default_world, run_as_rank, run_on_ranks
    from ds_vrgd.doctor.settings import prepare
    from ds_vrgd.doctor.table import render
    from ds_vrgd.zero.configs import read_config
    from ds_vrgd.zero.launchers import adopt_launcher

    try:
        launched = adopt_launcher()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    world = int(os.environ["WORLD_SIZE"]) if launched else options.world or default_world()
    steps = options.steps or 3
    locks = stale_locks()
    for lock in locks if is_rank_zero else []:
        print(f"warning: {lock}", file=sys.stderr, flush=True)
    try:
        if options.world not in (None, world):
            raise ValueError(f"--world {options.world}, but {world} ranks were launched; leave --world out")
        settings = prepare(read_config(options.deepspeed_config), world, get_accelerator().device_name())
        if launched:
            outcome = run_as_rank(examine, settings, options.model, steps)
        else:
            outcome = run_on_ranks(world, examine, settings, options.model, steps)
    except ValueError as error:
        if is_rank_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = Outcome([("FAILED", error.summary)], NOT_EXACT)
    if is_rank_zero:
        given = settings.arguments.items()
        rows = [*versions().items(), ("configuration", str(options.deepspeed_config))]
        rows.append(("optimizer", ", ".join([settings.optimizer, *(f"{name}={value}" for name, value in given)])))
        rows += [("changed here", change) for change in settings.changes]
        rows += [("warning", lock) for lock in locks]
        print(render([*rows, *outcome.rows]), flush=True)
    return outcome.status
