"""Command line of a training run on images."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds_vrgd_recipes.run.command import run_rank
from ds_vrgd_recipes.vision.runfile import load_run_file
from ds_vrgd_recipes.vision.train import Images


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as one rank of a launch; return the exit status (2: input that cannot be used)."""
    description = "Train a residual network; start with deepspeed, torchrun, srun or mpirun (docs/RESNET.md)."
    return run_rank(arguments, description, load_run_file, Images)


if __name__ == "__main__":
    sys.exit(main())
