"""``ds-vrgd plot``: the pictures of a run, and of several."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plot",
        help="draw the log of a run, or compare runs",
        description="Draw what a run has logged so far: losses, speed, learning rate, noise scale with its interval "
        "against the batch, the fraction of the gradient that was clamped, GSNR; and, in a second file, GSNR by layer. "
        "Several runs: their losses, speed and noise scale in one picture.",
    )
    parser.add_argument(
        "run_folder", type=Path, nargs="+", metavar="RUN", help="a run's output folder, finished or not"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="picture, such as run.svg or run.pdf (default: RUN/training.png, with RUN/layers.png; of several runs: "
        "comparison.png)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draw a run, or several; return 2 if there is nothing to draw."""
    from ds_vrgd.extras import need
    from ds_vrgd_recipes.run.errors import InputError
    from ds_vrgd_recipes.run.plot import compare, plot

    need("plot", "matplotlib", distribution="ds_vrgd_recipes")
    try:
        if len(options.run_folder) == 1:
            print(*plot(options.run_folder[0], options.output), sep="\n")
        else:
            print(compare(options.run_folder, options.output or Path("comparison.png")))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
