"""Command line of a training run: one rank of a launch, from the arguments to the exit status."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import deepspeed

from ds_vrgd.engines.deepspeed.launchers import adopt_launcher
from ds_vrgd_recipes.installed import config_path
from ds_vrgd_recipes.run.check import check_only
from ds_vrgd_recipes.run.errors import InputError, Interrupted, PreparationFailed, TrainingFailed
from ds_vrgd_recipes.run.launch import configure_cpu_ranks, load_deepspeed_config, without_launcher
from ds_vrgd_recipes.run.locks import locked_output
from ds_vrgd_recipes.run.loop import Task, train
from ds_vrgd_recipes.run.output import AUTO
from ds_vrgd_recipes.run.ranks import Ranks, leave, own_name

RunFile = TypeVar("RunFile")


def run_rank(
    arguments: Sequence[str] | None,
    description: str,
    load: Callable[[Path, Sequence[str]], RunFile],
    task: Callable[[RunFile], Task],
) -> int:
    """Train as one rank of a launch.

    Args:
        arguments: of the command line; None: those of this process.
        load: reads the run file, with the values that replace those in it.
        task: makes the task of a run file.

    Returns:
        The exit status; 2: input that cannot be used.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--deepspeed_config", "--config", type=config_path, required=True, metavar="JSON",
        help="DeepSpeed's configuration",
    )  # fmt: skip
    parser.add_argument(
        "--run", type=config_path, required=True, metavar="YAML", help="run file: data, model, schedule"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where everything is written")
    parser.add_argument(
        "--resume",
        type=lambda text: AUTO if text == AUTO else Path(text),
        metavar="FOLDER",
        help="resume from the checkpoint in this output or checkpoint folder; auto: from that in --output, or begin "
        "where there is none yet",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value of the run file: phases.0.lr=1e-3 seed=2"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything short of training, report the plan, write nothing"
    )
    parser.add_argument("--local_rank", type=int, help="set by the launcher")
    options = parser.parse_intermixed_args(arguments)
    try:
        if not adopt_launcher():
            without_launcher()
        run = load(options.run, options.overrides)
        config = load_deepspeed_config(options.deepspeed_config)
    except ValueError as error:
        # The ranks do not know one another yet, and the file may be missing on one host alone: each reports for itself.
        print(f"error: {own_name()}{error}", file=sys.stderr, flush=True)
        return 2
    try:
        configure_cpu_ranks()
        deepspeed.init_distributed()
        ranks = Ranks()
        try:
            with contextlib.ExitStack() as held:
                if not options.dry_run:
                    lock = locked_output(options.output, "training")
                    ranks.on_rank_zero(lambda: held.enter_context(lock))
                start = check_only if options.dry_run else train
                line = start(task(run), config, options.output, options.resume)
        except Interrupted as interruption:
            line = str(interruption)
        except (InputError, PreparationFailed, TrainingFailed) as error:
            for message in ranks.messages(str(error)):
                print(f"error: {message}", file=sys.stderr, flush=True)
            return 2 if isinstance(error, InputError) else 1
        if ranks.rank == 0:
            print(line, flush=True)
    finally:
        leave()
    return 0
