"""The check of a run that is to be started: everything short of data and training, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.launch import fill_deepspeed_config
from ds_vrgd_recipes.run.loop import Task, describe
from ds_vrgd_recipes.run.output import AUTO, check_output
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.run.start import rehearse


def check_only(
    task: Task, deepspeed_config: dict[str, Any], output: Path, resume: Path | Literal["auto"] | None
) -> str:
    """Return what ``loop.train`` would do, or raise what it would raise before it reads data. Collective.

    The files of a checkpoint and of prepared data are not compared with their sha256.

    Raises:
        InputError: something that the user gave cannot be used.
    """
    run, ranks = task.run, Ranks()
    settings = ranks.on_rank_zero(lambda: describe(task, deepspeed_config, ranks))
    finished = ranks.on_rank_zero(lambda: check_output(run, settings, output, resume))
    if finished is not None:
        return finished
    find = checkpoint.find_last if resume == AUTO else checkpoint.find
    found = ranks.on_rank_zero(lambda: find(output if resume == AUTO else resume)) if resume else None
    config = ranks.on_rank_zero(
        lambda: fill_deepspeed_config(deepspeed_config, run.batches, 0, ranks.size, output, task.group_options)
    )
    if found is not None:
        description = describe(task, config, ranks)
        ranks.on_rank_zero(lambda: checkpoint.check(found, description))
    folder = getattr(run, "prepared_data", None) or output / "data"
    ranks.on_rank_zero(lambda: task.check_data(folder))
    rehearse(config, task.groups)
    lines = [f"{config['optimizer']['type']}, ZeRO stage {config.get('zero_optimization', {}).get('stage', 0)}"]
    for number, batches in enumerate(run.batches):
        accumulation = batches.accumulation_steps(ranks.size)
        updates = f"{task.phases[number]:,} updates of " if task.phases else "updates of "
        lines.append(
            f"{batches.phase}{': ' if batches.phase else ''}{updates}{batches.global_batch:,} {task.unit}: ranks "
            f"{ranks.size} x accumulation {accumulation} = k {ranks.size * accumulation}, of micro-batch "
            f"{batches.micro_batch}"
        )
    if task.prepares:
        ready = ranks.on_rank_zero(folder.exists)
        lines.append(f"data: {folder}, {'ready' if ready else 'to be prepared'}")
    lines.append(f"output: {output}, " + (f"resumed from {found.folder / found.tag}" if found else "a new run"))
    return "\n".join([*lines, "nothing was read, trained or written (--dry-run)"])
