"""Command line of a training run on images."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vrgd.training.command import run_rank
from ds_vrgd.vision.runfile import load_run_file
from ds_vrgd.vision.train import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as one rank of a launch; returns the exit status (2: input that cannot be used)."""
    description = "Train a residual network; start with deepspeed, torchrun, srun or mpirun (docs/RESNET.md)."
    return run_rank(arguments, description, load_run_file, train)
