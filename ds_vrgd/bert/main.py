"""Command line of the pre-training run."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vrgd.bert.pretrain import pretrain
from ds_vrgd.bert.runfile import load_run_file
from ds_vrgd.training.command import run_rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Pre-train as one rank of a launch; returns the exit status (2: input that cannot be used)."""
    description = "Pre-train BERT in phases; start with deepspeed, torchrun, srun or mpirun (docs/CLUSTERS.md)."
    return run_rank(arguments, description, load_run_file, pretrain)
