"""``ds-vrgd``: one module a subcommand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import ds_vrgd
from ds_vrgd.cli import completion, doctor, plan, plot, suggest, to_universal
from ds_vrgd.extras import MissingExtra

#: ``add_parser`` of every subcommand. It adds its parser, whose default ``run`` takes the options and returns the exit
#: status; ``program`` among the options is the whole parser. What is slow to import is imported by ``run``.
COMMANDS: tuple[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None], ...] = (
    doctor.add_parser,
    plan.add_parser,
    plot.add_parser,
    suggest.add_parser,
    to_universal.add_parser,
    completion.add_parser,
)

EPILOG = """\
Each command tells its options by ds-vrgd COMMAND --help. Exit status: 0 done; 1 not done, or not exact; 2 the input, or
what is installed, does not serve. The trainings themselves are programs of their own (scripts/), which deepspeed,
torchrun, srun or mpirun starts.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status. Wrong usage exits with 2, as ever in argparse."""
    options = build_parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except MissingExtra as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="ds-vrgd", description="Tools for variance-reduced training with DeepSpeed.", epilog=EPILOG
    )
    parser.add_argument("--version", action="version", version=f"ds_vrgd {ds_vrgd.__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher puts it first
    parser.set_defaults(program=parser)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in COMMANDS:
        add_parser(subparsers)
    return parser
