"""Command line of the DLRM run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds_vrgd_recipes.clicks.runfile import load_run_file
from ds_vrgd_recipes.clicks.train import Clicks
from ds_vrgd_recipes.run.command import run_rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as one rank of a launch; return the exit status (2: input that cannot be used)."""
    description = "Train DLRM on click logs; start with deepspeed, torchrun, srun or mpirun (docs/CLUSTERS.md)."
    return run_rank(arguments, description, load_run_file, Clicks)


if __name__ == "__main__":
    sys.exit(main())
