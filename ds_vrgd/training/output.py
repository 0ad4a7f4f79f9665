"""The output folder of a run: what may be written where, and what a finished run leaves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from pydantic import BaseModel

from ds_vrgd.training.errors import InputError
from ds_vrgd.training.files import write_text

#: In place of a folder to resume from: the output itself, once it has something to go on from.
AUTO: Literal["auto"] = "auto"

_RESULT = "result.json"
# Written before training, complete or replaced by the next run: no reason to refuse a folder.
_DATA = {"data", "data.partial"}


def check_output(run: BaseModel, output: Path, resume: Path | Literal["auto"] | None) -> str | None:
    """Check that a run may write into ``output``; changes nothing.

    With :data:`AUTO` that is so where an earlier start of a run has begun, before its first checkpoint, too.

    Args:
        run: the run file.
        resume: as in ``--resume``.

    Returns:
        None: go on. Otherwise the folder holds this very run, finished, and the text says so.

    Raises:
        InputError: there is something else that would be overwritten.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output} is a file; give a folder")
    found = sorted(path.name for path in output.iterdir() if path.name not in _DATA) if output.exists() else []
    if not found:
        return None
    if _RESULT in found:
        result = json.loads((output / _RESULT).read_text(encoding="utf-8"))
        if result["run"] == run.model_dump(mode="json"):
            return (
                f"{output} already holds this run, finished: {', '.join(found)}. Nothing was overwritten. To train "
                f"again, remove {output} or give another --output.\n{result['summary']}"
            )
        raise InputError(f"--output {output} holds another run, finished; remove it or give another --output")
    if resume == AUTO:
        if {"checkpoints", "log.jsonl"} & set(found):
            return None
    elif resume is not None and output.resolve() in (resume.resolve(), *resume.resolve().parents):
        return None
    if (output / "checkpoints" / "latest").is_file():
        raise InputError(
            f"--output {output} holds an unfinished run; go on with it by --resume {output}, remove it, or give "
            "another --output"
        )
    if "log.jsonl" in found:
        raise InputError(
            f"--output {output} holds a run that ended before its first checkpoint; remove {', '.join(found)} from it "
            "and start again, or give another --output"
        )
    raise InputError(f"--output {output} is not empty ({', '.join(found)}); remove it or give another --output")


def whole_state(engine: Any, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """``network.state_dict()`` on rank 0's CPU, in the training dtype and whole at every ZeRO stage. Collective.

    Elsewhere it is empty.

    Args:
        network: the engine's module or a part of it.
    """
    state = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        # ZeRO-3 has a shard of each parameter; one at a time is made whole.
        sharded = hasattr(tensor, "ds_id")
        with deepspeed.zero.GatheredParameters(tensor) if sharded else contextlib.nullcontext():
            if engine.global_rank == 0:
                state[name] = tensor.detach().cpu().clone()
    return state


def finish(run: BaseModel, output: Path, summary: str) -> None:
    """Mark the run as finished."""
    result = {"summary": summary, "run": run.model_dump(mode="json")}
    write_text(output / _RESULT, json.dumps(result, indent=1) + "\n")
