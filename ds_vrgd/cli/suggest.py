"""``ds-vrgd suggest``: a batch size and a learning rate from a probe run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "suggest",
        help="a batch size and a learning rate from a short probe run",
        description="From the noise scale that a short run has logged: a batch size, a learning rate and a warm-up for "
        "the next one, with the reasons, and what they do not know. Says how many more updates are needed where the "
        "noise scale is too uncertain.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the probe run's output folder")
    parser.add_argument("--examples", type=int, help="of the planned run, for its updates and its warm-up ratio")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the advice; 1 if there is none."""
    from ds_vrgd.training.errors import InputError
    from ds_vrgd.training.suggest import lines, suggest

    try:
        if options.examples is not None and options.examples < 1:
            raise InputError(f"--examples {options.examples} must be positive")
        print("\n".join(lines(suggest(options.run_folder), options.examples)))
    except InputError as error:
        print(f"ds-vrgd suggest: {error}", file=sys.stderr)
        return 1
    return 0
