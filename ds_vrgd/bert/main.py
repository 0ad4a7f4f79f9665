"""Command line of the pre-training run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch

from ds_vrgd.bert.errors import InputError, Interrupted, PreparationFailed, TrainingFailed
from ds_vrgd.bert.launch import configure_cpu_ranks, load_deepspeed_config
from ds_vrgd.bert.output import AUTO
from ds_vrgd.bert.pretrain import pretrain
from ds_vrgd.bert.runfile import load_run_file
from ds_vrgd.zero.launchers import adopt_launcher


def main(arguments: Sequence[str] | None = None) -> int:
    """Pre-train as one rank of a launch; returns the exit status (2: input that cannot be used)."""
    parser = argparse.ArgumentParser(
        description="Pre-train BERT in phases; start with deepspeed, torchrun, srun or mpirun (docs/CLUSTERS.md)."
    )
    parser.add_argument(
        "--deepspeed_config", "--config", type=Path, required=True, metavar="JSON", help="DeepSpeed's configuration"
    )
    parser.add_argument("--run", type=Path, required=True, metavar="YAML", help="the run file: data, model, phases")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where everything is written")
    parser.add_argument(
        "--resume",
        type=lambda text: AUTO if text == AUTO else Path(text),
        metavar="FOLDER",
        help="go on from the checkpoint in this output or checkpoint folder; auto: from that in --output, or from the "
        "beginning where there is none yet",
    )
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    options = parser.parse_args(arguments)
    try:
        adopt_launcher()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    try:
        run = load_run_file(options.run)
        config = load_deepspeed_config(options.deepspeed_config)
        configure_cpu_ranks()
        deepspeed.init_distributed()
        line = pretrain(run, config, options.output, options.resume)
    except Interrupted as interruption:
        line = str(interruption)
    except (InputError, PreparationFailed, TrainingFailed) as error:
        if is_rank_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, InputError) else 1
    finally:
        # An exit with live process groups can abort on their threads, and lose the exit status.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if is_rank_zero:
        print(line, flush=True)
    return 0
