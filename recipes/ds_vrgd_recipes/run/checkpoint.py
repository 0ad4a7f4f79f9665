"""Checkpoints of a run through DeepSpeed, and the checks before one is resumed.

Under ``checkpoints`` a folder ``step-...`` is a complete checkpoint: it is written as ``step-....partial`` and gets its
name when every file of every rank is on the disk and the manifest is written. ``latest``, which names the newest, is
written after that. Older checkpoints are deleted last.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vrgd.engines.deepspeed import CheckpointError, guard_loading
from ds_vrgd.engines.deepspeed.register import NAMES
from ds_vrgd.manifest import Fingerprint, first_fault, has_manifest, read_json
from ds_vrgd_recipes.run.errors import InputError, TrainingFailed
from ds_vrgd_recipes.run.files import fingerprint, shortened, sync_folder, write_text
from ds_vrgd_recipes.run.log import has_begun
from ds_vrgd_recipes.run.manifest import remove_manifest, saved_bytes, write_manifest
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.run.saving import save_checkpoint
from ds_vrgd_recipes.run.settings import arguments_of_groups, difference, with_defaults

#: Named after the first such run: existing checkpoints have it.
_DESCRIPTION = "pretraining.json"
_CHECKPOINTS = "checkpoints"
_LATEST = "latest"
_PARTIAL = ".partial"
#: Within the output; exists only while a run resumes with another number of ranks.
CONVERTED = f"{_CHECKPOINTS}/universal"


@dataclass(frozen=True)
class Resumption:
    """A checkpoint: DeepSpeed's folder and tag, the updates done, and how many ranks saved it."""

    folder: Path
    tag: str
    step: int
    saved_ranks: int

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank saved a share. Without ZeRO rank 0 saved everything."""
        return any((self.folder / self.tag).glob("*_optim_states.pt"))


def save(engine: Any, ranks: Ranks, output: Path, step: int, description: dict[str, Any], keep: int) -> None:
    """Save the engine after ``step`` updates under ``output``, then delete all but the newest ``keep``. Collective.

    Raises:
        TrainingFailed: a rank could not write; raised on every rank. Earlier checkpoints are as they were.
    """
    folder, tag = output / _CHECKPOINTS, _tag(step)
    partial = folder / (tag + _PARTIAL)
    state = {**description, "step": step}
    ranks.on_rank_zero(lambda: _written(output, tag, lambda: _begin(partial, state)))
    written = save_checkpoint(engine, folder, partial.name, {"pretraining": state})
    own: dict[str, Fingerprint] = {}
    if written.error is None:
        try:
            own = {str(file.relative_to(partial)): fingerprint(file) for file in written.files}
        except OSError as error:  # some disks report only now that they are full
            written.error = str(error)
    everyones = ranks.gather((own, written.error))
    ranks.on_rank_zero(lambda: _written(output, tag, lambda: _complete(partial, everyones)))
    ranks.on_rank_zero(lambda: _prune(folder, step, keep))


def tidy(output: Path) -> None:
    """Remove what a killed run has left half-written or half-deleted. Call it on one rank, before anything is read."""
    for partial in (output / _CHECKPOINTS).glob(f"step-*{_PARTIAL}"):
        final = _final(partial)
        if has_manifest(partial) and not has_manifest(final):
            shutil.rmtree(final, ignore_errors=True)  # the remains of one that was being replaced
            partial.rename(final)  # complete, but killed before it had its name
        else:
            shutil.rmtree(partial)
    shutil.rmtree(output / CONVERTED, ignore_errors=True)


def find(path: Path) -> Resumption:
    """Locate the newest checkpoint in an output folder or a checkpoint folder, or the given one.

    Raises:
        InputError: ``path`` is neither, or ``latest`` or the description of the checkpoint is damaged.
    """
    checkpoint = newest(path)
    if checkpoint is None:
        complete = _steps(path / _CHECKPOINTS)
        raise InputError(
            f"--resume {path} is not a checkpoint of a run; give the --output of an earlier run, its "
            "folder checkpoints, or one step-... folder in there"
            + (f", such as {path / _CHECKPOINTS / _tag(complete[-1])}" if complete else "")
            + (f"; the run in {path} has none yet: begin it again with --resume auto" if has_begun(path) else "")
        )
    folder, tag = checkpoint.parent, checkpoint.name
    fault = first_fault(folder / tag, only=_DESCRIPTION)
    if fault is not None:
        _refuse_damaged(folder / tag, fault)
    state = _read(folder / tag / _DESCRIPTION)
    for key in ("step", "ranks"):
        if not isinstance(state.get(key), int):
            _refuse_damaged(folder / tag, f"{_DESCRIPTION} has {key}={state.get(key)!r}, not a number")
    return Resumption(folder, tag, state["step"], state["ranks"])


def find_last(output: Path) -> Resumption | None:
    """Locate the newest checkpoint in an output folder; None where there is none yet.

    Raises:
        InputError: its description is damaged.
    """
    complete = _steps(output / _CHECKPOINTS)
    if newest(output) is None and complete:  # killed before ``latest`` named it
        return find(output / _CHECKPOINTS / _tag(complete[-1]))
    return find(output) if complete else None


def description(output: Path) -> dict[str, Any]:
    """Return what the newest checkpoint in an output folder records of its run; nothing if none can be read."""
    try:
        found = find_last(output)
        return _read(found.folder / found.tag / _DESCRIPTION) if found else {}
    except (InputError, OSError):
        return {}


def newest(path: Path) -> Path | None:
    """Return the newest checkpoint of an output or checkpoint folder, or ``path`` if it is one; None if neither.

    Raises:
        InputError: ``latest`` names no checkpoint of its folder.
    """
    for folder in (path / _CHECKPOINTS, path):
        latest = folder / _LATEST
        if latest.is_file():
            name = latest.read_bytes().decode("utf-8", "backslashreplace").strip()
            if not re.fullmatch(r"step-\d+", name):
                _refuse_damaged(latest, f"it holds {shortened(name)}, not the name of a step-... folder next to it")
            return folder / name
    return path if (path / _DESCRIPTION).is_file() else None


def description_of(checkpoint: Path) -> dict[str, Any]:
    """Return the description that was saved with the checkpoint, and its "step"."""
    return _read(checkpoint / _DESCRIPTION)


def verify(resumption: Resumption, ranks: Ranks) -> None:
    """Read every file of the checkpoint and compare it with what was saved, each rank its share. Collective.

    Raises:
        InputError: a file is missing, cut short or changed; raised on every rank. The message names the file, and the
            newest earlier checkpoint that is whole.
    """
    checkpoint = resumption.folder / resumption.tag
    faults = [fault for fault in ranks.gather(first_fault(checkpoint, ranks.rank, ranks.size)) if fault is not None]
    if faults:
        # One rank looks for a whole checkpoint, which can take as long again.
        ranks.on_rank_zero(lambda: _refuse_damaged(checkpoint, faults[0]))


def check(resumption: Resumption, description: dict[str, Any]) -> None:
    """Check that the checkpoint is one of this run.

    The keys of ``description`` are what the two runs must agree on. A key that an older checkpoint does not have is not
    compared. The phases that have begun must be as they were; later ones may change. The ranks may be fewer or more
    where the state can be carried over, see ``start.fitting``.

    Raises:
        InputError: anything differs (model, data, seed, begun phases, ZeRO stage, the optimizer and its arguments,
            precision, clipping), or the number of ranks where only as many can load the checkpoint.
    """
    saved = _read(resumption.folder / resumption.tag / _DESCRIPTION)
    begun, first = 0, 0
    for phase in saved["phases"]:
        if first >= resumption.step:
            break
        begun += 1
        first += phase["steps"]
    differences = []
    for key, wanted in description.items():
        if key not in saved:
            continue
        was = saved[key]
        if key == "phases":
            was, wanted = was[:begun], wanted[:begun]
        elif key == "optimizer_params" and description["optimizer"] == saved["optimizer"]:
            was = with_defaults(saved["optimizer"], was)
        elif key == "optimizer_params" or (key == "ranks" and _any_ranks(resumption, saved)):
            continue
        if was != wanted:
            differences.append(difference(key, was, wanted))
    if differences:
        raise InputError(_other_run(resumption, differences))


def load(engine: Any, resumption: Resumption) -> None:
    """Load weights and optimizer state. Collective.

    Raises:
        InputError: DeepSpeed finds no such checkpoint, or finds another one than the description says, or the optimizer
            of an older version, which described less, had other arguments.
    """
    guard_loading(engine)  # engines with our optimizers are guarded already; baselines are not
    built = arguments_of_groups(engine.optimizer.param_groups)
    try:
        loaded, client_state = engine.load_checkpoint(str(resumption.folder), tag=resumption.tag)
    except CheckpointError as error:  # on all ranks
        raise InputError(f"--resume: {error}") from error
    if loaded is None or client_state["pretraining"]["step"] != resumption.step:
        raise InputError(
            f"--resume {resumption.folder / resumption.tag} is incomplete or mixed from two checkpoints; give another "
            "step-... folder"
        )
    loaded_groups = arguments_of_groups(engine.optimizer.param_groups)  # what DeepSpeed has loaded over the new ones
    was = [{key: group.get(key, own[key]) for key in own} for group, own in zip(loaded_groups, built, strict=True)]
    if was != built:
        raise InputError(_other_run(resumption, [difference("optimizer_params", was, built)]))


def _other_run(resumption: Resumption, differences: list[str]) -> str:
    return (
        f"--resume {resumption.folder / resumption.tag} was saved with {', '.join(differences)}; use the settings of "
        "that run, or start anew without --resume in another --output"
    )


def _begin(partial: Path, state: dict[str, Any]) -> None:
    partial.mkdir(parents=True)
    # Next to the weights, so that a misfit is found without reading gigabytes or failing half-way.
    write_text(partial / _DESCRIPTION, json.dumps(state, indent=1) + "\n")


def _complete(partial: Path, everyones: list[tuple[dict[str, Fingerprint], str | None]]) -> None:
    """Turn what all ranks have written into the newest checkpoint.

    Raises:
        OSError: a rank could not write, or wrote where this rank cannot see it.
    """
    files = {}
    for rank, (own, error) in enumerate(everyones):
        if error is not None:
            raise OSError(f"rank {rank}: {error}")
        files.update(own)
    for path in partial.rglob("*"):  # also the description, and files that DeepSpeed writes by other means
        if path.is_file() and (name := str(path.relative_to(partial))) not in files:
            files[name] = fingerprint(path)
    for name in files:
        if not (partial / name).is_file():
            raise OSError(f"{name} is not visible to rank 0; put the output on a shared file system")
    write_manifest(partial, files)
    final = _final(partial)
    if final.exists():  # left by a run that resumed from an earlier checkpoint than this one
        _delete(final)
    partial.rename(final)
    sync_folder(final.parent)
    write_text(final.parent / _LATEST, final.name)


def _written(output: Path, tag: str, work: Callable[[], None]) -> None:
    """Do ``work`` for the checkpoint ``tag``; remove what there is of the checkpoint if it cannot be written.

    Raises:
        TrainingFailed: it cannot be written; the message has the free and the needed disk space.
    """
    folder = output / _CHECKPOINTS
    try:
        work()
    except OSError as error:
        shutil.rmtree(folder / (tag + _PARTIAL), ignore_errors=True)
        message = f"checkpoint {tag} could not be written to {folder}: {error}. "
        with contextlib.suppress(OSError):
            message += f"{shutil.disk_usage(folder).free / 1e9:.3g} GB are free there"
        earlier = _steps(folder)
        if earlier:
            message += (
                f", and {_tag(earlier[-1])} takes {_gigabytes(folder / _tag(earlier[-1]))} GB; free as much "
                f"(keep_checkpoints in the run file limits what this run keeps) and resume with --resume {output}"
            )
        else:
            message += "; free some and start again with --resume auto: no checkpoint had been written before"
        raise TrainingFailed(message) from error


def _gigabytes(checkpoint: Path) -> str:
    try:
        return f"{saved_bytes(checkpoint) / 1e9:.3g}"
    except (OSError, ValueError):  # damaged, which is not what this message is about
        return "some"


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints up to ``step``, which is one of them and complete.

    Later ones, of a run that this one has gone back from, stay until they are reached.
    """
    older = [each for each in _steps(folder) if each < step]
    for each in older[: max(0, len(older) - (keep - 1))]:
        # A kill during the deletion leaves nothing with the name of a checkpoint.
        partial = folder / (_tag(each) + _PARTIAL)
        (folder / _tag(each)).rename(partial)
        _delete(partial)


def _delete(checkpoint: Path) -> None:
    remove_manifest(checkpoint)
    shutil.rmtree(checkpoint)


def _refuse_damaged(checkpoint: Path, fault: str) -> None:
    """Raise the InputError for a damaged checkpoint; it names the newest earlier one that is whole."""
    number = checkpoint.name.removeprefix("step-").removesuffix(_PARTIAL)
    earlier = [step for step in _steps(checkpoint.parent) if not number.isdigit() or step < int(number)]
    for step in reversed(earlier):
        whole = checkpoint.parent / _tag(step)
        if first_fault(whole) is None:
            way_out = f"the newest whole one before it is {whole}: resume from there with --resume {whole}"
            break
    else:
        way_out = "there is no whole one before it: start anew without --resume in another --output"
    raise InputError(f"--resume: checkpoint {checkpoint} is damaged: {fault}. Nothing was loaded; {way_out}")


def _tag(step: int) -> str:
    return f"step-{step:06d}"


def _final(partial: Path) -> Path:
    return partial.with_name(partial.name.removesuffix(_PARTIAL))


def _steps(folder: Path) -> list[int]:
    """Return the updates after which there is a complete checkpoint in ``folder``, ascending."""
    numbers = (path.name.removeprefix("step-") for path in folder.glob("step-*") if has_manifest(path))
    return sorted(int(number) for number in numbers if number.isdigit())


def _any_ranks(resumption: Resumption, saved: dict[str, Any]) -> bool:
    """Return whether any number of ranks can resume: an optimizer of ours, and ZeRO's shards or none at all.

    Without ZeRO DeepSpeed's BF16_Optimizer has shards, too, and loads them only on the same number of ranks.
    """
    return saved["optimizer"] in NAMES and (saved["zero_stage"] > 0 or not resumption.is_sharded)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = read_json(path)
    return content
