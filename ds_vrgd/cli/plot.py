"""``ds-vrgd plot``: the picture of a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plot",
        help="draw the log of a run",
        description="Draw what a run has logged so far: losses, learning rate, the noise scale with its interval "
        "against the batch, the fraction of the gradient that was clamped, and GSNR by layer.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's output folder, finished or not")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="picture, such as run.svg or run.pdf (default: RUN/training.png)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw; 1 if there is nothing to be drawn."""
    from ds_vrgd.extras import need
    from ds_vrgd.training.errors import InputError
    from ds_vrgd.training.plot import plot

    need("plot", "matplotlib")
    try:
        print(plot(options.run_folder, options.output))
    except InputError as error:
        print(f"ds-vrgd plot: {error}", file=sys.stderr)
        return 1
    return 0
