"""Checkpoints of a run through DeepSpeed, and the checks before one is resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.runfile import RunFile

_DESCRIPTION = "pretraining.json"
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Resumption:
    """A checkpoint that fits the run: DeepSpeed's folder and tag, and the update to go on with."""

    folder: Path
    tag: str
    step: int


def describe(run: RunFile, vocabulary_sha256: str, ranks: int, deepspeed_config: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must agree on."""
    return {
        "model": run.model.model_dump(),
        "vocabulary_sha256": vocabulary_sha256,
        "seed": run.seed,
        "phases": [phase.model_dump() for phase in run.phases],
        "ranks": ranks,
        "zero_stage": deepspeed_config.get("zero_optimization", {}).get("stage", 0),
        "optimizer": deepspeed_config["optimizer"]["type"],
    }


def save(engine: Any, output: Path, step: int, description: dict[str, Any]) -> None:
    """Save the engine after ``step`` updates under ``output``. Collective."""
    tag = f"step-{step:06d}"
    state = {**description, "step": step}
    if engine.global_rank == 0:
        folder = output / _CHECKPOINTS / tag
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the weights, so that a misfit is found without reading gigabytes or failing half-way.
        (folder / _DESCRIPTION).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    engine.save_checkpoint(str(output / _CHECKPOINTS), tag=tag, client_state={"pretraining": state})


def find(path: Path) -> Resumption:
    """Locate the newest checkpoint in an output folder or a checkpoint folder, or the given one.

    Raises:
        InputError: ``path`` is neither.
    """
    for folder in (path / _CHECKPOINTS, path):
        if (folder / "latest").is_file():
            tag = (folder / "latest").read_text(encoding="utf-8").strip()
            break
    else:
        folder, tag = path.parent, path.name
    description = folder / tag / _DESCRIPTION
    if not description.is_file():
        raise InputError(
            f"--resume {path} is not a checkpoint of a pre-training run; give the --output of an earlier run, its "
            "folder checkpoints, or one step-... folder in there"
        )
    return Resumption(folder, tag, _read(description)["step"])


def check(resumption: Resumption, description: dict[str, Any]) -> None:
    """Check that the checkpoint continues this run.

    The phases that have begun must be as they were; later ones may change.

    Raises:
        InputError: model, vocabulary, seed, begun phases, ranks, ZeRO stage or optimizer differ.
    """
    saved = _read(resumption.folder / resumption.tag / _DESCRIPTION)
    begun, first = 0, 0
    for phase in saved["phases"]:
        if first >= resumption.step:
            break
        begun += 1
        first += phase["steps"]
    for key, wanted in description.items():
        was = saved[key]
        if key == "phases":
            was, wanted = was[:begun], wanted[:begun]
        if was != wanted:
            raise InputError(
                f"--resume {resumption.folder / resumption.tag} was saved with {_difference(key, was, wanted)}; use "
                "the settings of that run, or start anew without --resume in another --output"
            )


def load(engine: Any, resumption: Resumption) -> None:
    """Load weights and optimizer state. Collective.

    Raises:
        InputError: DeepSpeed finds no such checkpoint, or another one than its description says.
    """
    loaded, client_state = engine.load_checkpoint(str(resumption.folder), tag=resumption.tag)
    if loaded is None or client_state["pretraining"]["step"] != resumption.step:
        raise InputError(
            f"--resume {resumption.folder / resumption.tag} is incomplete or mixed from two checkpoints; give another "
            "step-... folder"
        )


def _difference(key: str, was: Any, wanted: Any) -> str:
    """The differing values alone, down to the single key."""
    if isinstance(was, list) and isinstance(wanted, list) and len(was) == len(wanted):
        was, wanted = dict(enumerate(was, start=1)), dict(enumerate(wanted, start=1))
    if isinstance(was, dict) and isinstance(wanted, dict):
        return ", ".join(
            _difference(f"{key}.{name}", was.get(name), wanted.get(name))
            for name in {**was, **wanted}
            if was.get(name) != wanted.get(name)
        )
    return f"{key}={was}, not {wanted}"


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
