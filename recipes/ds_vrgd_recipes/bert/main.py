"""Command line of the pre-training run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ds_vrgd_recipes.bert.pretrain import Pretraining
from ds_vrgd_recipes.bert.runfile import load_run_file
from ds_vrgd_recipes.run.command import run_rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Pre-train as one rank of a launch; return the exit status (2: input that cannot be used)."""
    description = "Pre-train BERT in phases; start with deepspeed, torchrun, srun or mpirun (docs/CLUSTERS.md)."
    return run_rank(arguments, description, load_run_file, Pretraining)


if __name__ == "__main__":
    sys.exit(main())
