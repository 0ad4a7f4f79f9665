"""Command line of a training run: one rank of a launch, from the arguments to the exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import deepspeed

from ds_vrgd.training.errors import InputError, Interrupted, PreparationFailed, TrainingFailed
from ds_vrgd.training.launch import configure_cpu_ranks, load_deepspeed_config
from ds_vrgd.training.output import AUTO
from ds_vrgd.training.ranks import leave
from ds_vrgd.zero.launchers import adopt_launcher

RunFile = TypeVar("RunFile")


def run_rank(
    arguments: Sequence[str] | None,
    description: str,
    load: Callable[[Path], RunFile],
    train: Callable[[RunFile, dict[str, Any], Path, Path | Literal["auto"] | None], str],
) -> int:
    """Train as one rank of a launch.

    Args:
        arguments: of the command line; None for this process's.
        load: reads the run file.
        train: (run file, DeepSpeed's configuration, ``--output``, ``--resume``) -> the line that sums the run up.

    Returns:
        The exit status; 2: input that cannot be used.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--deepspeed_config", "--config", type=Path, required=True, metavar="JSON", help="DeepSpeed's configuration"
    )
    parser.add_argument("--run", type=Path, required=True, metavar="YAML", help="the run file: data, model, schedule")
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
        run = load(options.run)
        config = load_deepspeed_config(options.deepspeed_config)
        configure_cpu_ranks()
        deepspeed.init_distributed()
        line = train(run, config, options.output, options.resume)
    except Interrupted as interruption:
        line = str(interruption)
    except (InputError, PreparationFailed, TrainingFailed) as error:
        if is_rank_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, InputError) else 1
    finally:
        leave()
    if is_rank_zero:
        print(line, flush=True)
    return 0
