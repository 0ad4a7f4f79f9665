"""The output folder of a run: what may be written into it, and what a finished run leaves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import deepspeed
import torch
from pydantic import BaseModel

from ds_vrgd.manifest import read_json
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import write_binary, write_text
from ds_vrgd_recipes.run.locks import LOCK
from ds_vrgd_recipes.run.log import NAME, has_begun, has_records
from ds_vrgd_recipes.run.settings import difference

#: In place of a folder to resume from: the output itself, once it has something to resume from.
AUTO: Literal["auto"] = "auto"

_RESULT = "result.json"
# Written before training, either complete or replaced by the next run: no reason to refuse a folder.
_DATA = {"data", "data.partial", LOCK}
# What a start that ends before its first update may leave. Older versions wrote no log so early.
_OF_A_START = {"checkpoints", "csv", "tensorboard", NAME}


def check_output(
    run: BaseModel, settings: Mapping[str, Any], output: Path, resume: Path | Literal["auto"] | None
) -> str | None:
    """Check that a run may write into ``output``; changes nothing.

    A start that ended before its first update leaves nothing that could be lost: the same command begins again. With
    :data:`AUTO` a run that ended before its first checkpoint begins again, too.

    Args:
        run: the run file.
        settings: of the task and the DeepSpeed JSON, which make another run of a run file.
        resume: as in ``--resume``.

    Returns:
        None: train. A text: the folder holds this very run, finished.

    Raises:
        InputError: something else would be overwritten.
    """
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output} is a file; give a folder")
    for around in output.resolve().parents:
        if has_begun(around) or (around / "checkpoints" / "latest").is_file():
            raise InputError(
                f"--output {output} is inside {around}, which is the output of another run; give a folder outside of it"
            )
    data = _DATA | _own_data(run, output)
    found = sorted(path.name for path in output.iterdir() if path.name not in data) if output.exists() else []
    if not found:
        return None
    if _RESULT in found:
        return (
            f"{output} already holds this run, finished: {', '.join(found)}. Nothing was overwritten. To train again, "
            f"give another --output.\n{_summary(run, settings, output)}"
        )
    checkpoints = output / "checkpoints"
    has_checkpoints = any(
        each.suffix != ".partial" for pattern in ("step-*", "latest") for each in checkpoints.glob(pattern)
    )
    if not has_checkpoints and not has_records(output) and (has_begun(output) or _OF_A_START.issuperset(found)):
        return None
    if resume == AUTO:
        if has_checkpoints or has_begun(output):
            return None
    elif resume is not None and output.resolve() in (resume.resolve(), *resume.resolve().parents):
        return None
    if has_checkpoints:
        raise InputError(
            f"--output {output} holds an unfinished run; resume it with --resume {output}, or give another --output"
        )
    if has_begun(output):
        raise InputError(
            f"--output {output} holds a run that ended before its first checkpoint; begin it again with --resume auto, "
            "or give another --output"
        )
    others = ", ".join(name for name in found if name not in _OF_A_START)
    raise InputError(
        f"--output {output} holds {others or ', '.join(found)}, which no run has written; move that elsewhere, or give "
        "another --output"
    )


def _own_data(run: BaseModel, output: Path) -> set[str]:
    """Return the names in ``output`` that belong to the prepared data, where the run file has them there."""
    folder: Path | None = getattr(run, "prepared_data", None)
    if folder is None or output.resolve() not in folder.resolve().parents:
        return set()
    name = folder.resolve().relative_to(output.resolve()).parts[0]
    return {name, f"{name}.partial"}


def _summary(run: BaseModel, settings: Mapping[str, Any], output: Path) -> str:
    """Return the line that sums up the finished run.

    Raises:
        InputError: it is another run, or its result is damaged.
    """
    try:
        result = read_json(output / _RESULT)
        summary: str = result["summary"]
        was = {"run": result["run"], "settings": result.get("settings")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--output {output} holds a finished run whose {_RESULT} is damaged ({type(error).__name__}: {error}); "
            "give another --output"
        ) from error
    for name, wanted in _described(run, settings).items():
        if was[name] not in (None, wanted):  # older versions wrote no settings
            raise InputError(
                f"--output {output} holds another run, finished, with {difference(name, was[name], wanted)}; give "
                "another --output"
            )
    return summary


def _described(run: BaseModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a run this one, as a file has it; on how many ranks it ran does not."""
    kept = {name: value for name, value in settings.items() if name != "ranks"}
    return {"run": run.model_dump(mode="json"), "settings": json.loads(json.dumps(kept))}


def whole_state(engine: Any, network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return ``network.state_dict()`` on rank 0's CPU, and nothing on the others. Collective.

    Tensors are in the training dtype, and whole at every ZeRO stage.

    Args:
        network: the engine's module or a part of it.
    """
    state = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        # ZeRO-3 has a shard of each parameter; they are gathered one at a time.
        sharded = hasattr(tensor, "ds_id")
        with deepspeed.zero.GatheredParameters(tensor) if sharded else contextlib.nullcontext():
            if engine.global_rank == 0:
                state[name] = tensor.detach().cpu().clone()
    return state


def save_state(engine: Any, network: torch.nn.Module, output: Path) -> None:
    """Write :func:`whole_state` to ``output/model.pt``. Collective."""
    state = whole_state(engine, network)
    if engine.global_rank == 0:
        write_binary(output / "model.pt", lambda file: torch.save(state, file))


def finish(run: BaseModel, settings: Mapping[str, Any], output: Path, summary: str) -> None:
    """Mark the run as finished."""
    result = {"summary": summary, **_described(run, settings)}
    write_text(output / _RESULT, json.dumps(result, indent=1) + "\n")
