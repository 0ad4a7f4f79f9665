"""``ds-vrgd suggest``: a batch size and a learning rate from a probe run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from ds_vrgd_cli import add_json


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "suggest",
        help="a batch size and a learning rate from a short probe run",
        description="From the noise scale that a short run has logged: a batch size, a learning rate and a warm-up for "
        "the next one, with the reasons, and what they do not know. Where the noise scale is too uncertain, the number "
        "of further updates that it needs.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the probe run's output folder")
    parser.add_argument("--examples", type=int, help="of the planned run, for its updates and its warm-up ratio")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the advice; return 1 if it needs more updates, and 2 if the input has none."""
    from ds_vrgd_recipes.run.errors import InputError
    from ds_vrgd_recipes.run.suggest import TooUncertain, lines, suggest

    try:
        if options.examples is not None and options.examples < 1:
            raise InputError(f"--examples {options.examples} must be positive")
        found = suggest(options.run_folder)
        if options.json:
            options.result = json.dumps(dataclasses.asdict(found), indent=2)
        else:
            print("\n".join(lines(found, options.examples)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TooUncertain) else 2
    return 0
