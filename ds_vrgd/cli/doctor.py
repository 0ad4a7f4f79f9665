"""``ds-vrgd doctor``: is training exact under this DeepSpeed configuration, or under FSDP2?"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import Any

from ds_vrgd.extras import need


def run(options: argparse.Namespace) -> int:
    """Check a configuration, and return the exit status."""
    need("deepspeed", "deepspeed")
    import_module("ds_vrgd.engines.deepspeed")  # checks the release before other modules rely on it
    from deepspeed.accelerator import get_accelerator

    from ds_vrgd.doctor.environment import stale_locks, versions
    from ds_vrgd.doctor.fsdp import examine_fsdp, require_optimizer
    from ds_vrgd.doctor.ranks import RankFailed, default_world, run_as_rank, run_on_ranks
    from ds_vrgd.doctor.report import NOT_EXACT, REFUSED, Outcome, render, to_json
    from ds_vrgd.doctor.settings import prepare
    from ds_vrgd.doctor.trial import examine
    from ds_vrgd.engines.deepspeed.configs import read_config
    from ds_vrgd.engines.deepspeed.launchers import adopt_launcher

    try:
        launched = adopt_launcher()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    is_rank_zero = os.environ.get("RANK", "0") == "0"
    world = int(os.environ["WORLD_SIZE"]) if launched else options.world or default_world()
    steps, locks = options.steps or 3, stale_locks()
    for lock in locks if is_rank_zero else []:
        print(f"warning: {lock}", file=sys.stderr, flush=True)
    try:
        if options.world not in (None, world):
            raise ValueError(f"--world {options.world}, but {world} ranks were launched; leave --world out")
        if options.fsdp:
            rows = [("optimizer", require_optimizer("--fsdp", options.fsdp))]
            check: Any = (examine_fsdp, options.fsdp, options.model, steps)
        elif options.megatron:
            need("megatron", "megatron")
            from ds_vrgd.doctor.megatron import examine_megatron

            rows = [("optimizer", require_optimizer("--megatron", options.megatron))]
            if get_accelerator().device_name() == "cpu":
                raise ValueError(
                    "--megatron: Megatron-Core asks for CUDA, and there is no GPU here. Run it where one is"
                )
            check = (examine_megatron, options.megatron, options.model, steps)
        else:
            settings = prepare(read_config(options.deepspeed_config), world, get_accelerator().device_name())
            rows = [("configuration", str(options.deepspeed_config)), *settings.rows()]
            check = (examine, settings, options.model, steps)
        outcome = run_as_rank(*check) if launched else run_on_ranks(world, *check)[0]
    except ValueError as error:
        if is_rank_zero:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        outcome = Outcome([("FAILED", error.summary)], NOT_EXACT)
    if is_rank_zero:
        outcome.rows[:0] = [*versions().items(), *rows, *(("warning", lock) for lock in locks)]
        if options.json:
            options.result = to_json(outcome)
        else:
            print(render(outcome.rows), flush=True)
    return int(outcome.status)
