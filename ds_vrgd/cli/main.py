"""``ds-vrgd``: one module a subcommand."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import ds_vrgd
from ds_vrgd.cli import doctor, plan, plot, suggest, to_universal

#: ``add_parser`` of every subcommand. It adds its parser, whose default ``run`` takes the options and returns the exit
#: status. What is slow to import is imported by ``run``.
COMMANDS: tuple[Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None], ...] = (
    doctor.add_parser,
    plan.add_parser,
    plot.add_parser,
    suggest.add_parser,
    to_universal.add_parser,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status. Wrong usage exits with 2, as ever in argparse."""
    parser = argparse.ArgumentParser(prog="ds-vrgd", description="Tools for variance-reduced training with DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"ds_vrgd {ds_vrgd.__version__}")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher puts it first
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_parser in COMMANDS:
        add_parser(subparsers)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status
