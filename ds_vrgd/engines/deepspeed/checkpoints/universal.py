"""Carry a ZeRO checkpoint over to another number of ranks, with every element of every state.

Upstream's ``ds_to_universal`` knows Adam's states alone. The folders that are written here are in its layout, one file
per parameter and state, with a list of what must be there; ``checkpoints.restore`` loads them.

DeepSpeed writes flat shards without names in them. The offset of each element follows from ``param_shapes`` in the
model's file, whose order is that of the shards also with ``round_robin_gradients`` (upstream's own
``param_slice_mappings`` are wrong there), from the number of ranks, and from the padding between parameters.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ds_vrgd.engines.deepspeed.checkpoints.safe_load import CheckpointError, read_plain
from ds_vrgd.engines.deepspeed.wrappers import runs_across, slots

MANIFEST = "ds_vrgd_universal.json"
#: Frozen weights and buffers, by name.
REST = "rest.pt"
FORMAT = 1

_MODEL_FILE = "mp_rank_00_model_states.pt"
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
#: What the engine puts into a model's file and is not read from a universal checkpoint.
_NOT_READ = {"module", "frozen_param_fragments", "frozen_param_shapes", "param_shapes", "shared_params"}

#: The fp32 weights in an optimizer's file and the state of the base optimizer: at stages 1 and 2, and at stage 3.
_FLAT = ("single_partition_of_fp32_groups", "base_optimizer_state")
_STAGE_3 = ("fp32_flat_groups", "optimizer_state_dict")
#: What an optimizer's file holds of its own rank alone.
_SHARDED = {*_FLAT, *_STAGE_3, "param_slice_mappings", "group_paddings", "param_alignment_paddings"}
#: The forms (see :func:`_check`) of the model's file, and of the base optimizer's state.
_MODEL: dict[Any, Any] = {
    "dp_world_size": int,
    "module": Mapping,
    "buffer_names": list,
    "shared_params": (Mapping, list, type(None)),
    "param_shapes": [{...: (torch.Size, tuple, list)}, ...],
    "frozen_param_shapes": (dict, type(None)),
    "frozen_param_fragments": (dict, type(None)),
}
_BASE: dict[Any, Any] = {"state": {...: dict}, "param_groups": [{"params": list}, ...]}


class _Layer(NamedTuple):
    """A parameter in a flat buffer; ``pieces`` are ``(rank, start in its shard, elements)``, in order, none empty."""

    name: str
    shape: tuple[int, ...]
    pieces: list[tuple[int, int, int]]


class _Buffer(NamedTuple):
    """A flat buffer that was cut over the ranks: a param group, or at stage 3 a part of one."""

    group: int  # index of the param group
    layers: list[_Layer]
    states: list[dict[str, Any]]  # by rank, with the shard of the weights as "fp32"
    files: list[str]  # by rank: the name


def to_universal(
    folder: str | Path, output: str | Path, tag: str | None = None, *, client_state_of_rank_0: bool = False
) -> Path:
    """Convert a checkpoint of ZeRO stages 1 to 3 into one that any number of ranks load, at any of these stages.

    It keeps every per-element state, whatever its name, with ``step`` and every option of the param groups, loss scale,
    frozen weights, buffers (rank 0's), schedule and client state; not padding. An engine with one of this package's
    optimizers, over the same model and param groups, loads the result by ``engine.load_checkpoint(output)`` when its
    DeepSpeed JSON says ``"checkpoint": {"load_universal": true}``.

    Needs no engine and no GPU: one process, which holds one parameter in memory at a time.

    Args:
        folder: what ``engine.save_checkpoint`` was given, or a folder with the shards themselves.
        output: to be made, or to get one more tag; the result is ``output/<tag>``.
        tag: of the checkpoint; None for the one that ``latest`` names.
        client_state_of_rank_0: where the ranks' client states differ (stage 3), take rank 0's for all; else that is an
            error.

    Returns:
        The folder that was written, complete: until it is, it has another name.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, holds something that cannot be carried over,
            or the result exists already.
    """
    source = find(Path(folder), tag)
    target = Path(output) / source.name
    if target.exists():
        raise CheckpointError(f"{target} exists already: give another output folder, or remove it")
    models, buffers, common = _read(source)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "zero").mkdir(parents=True)
    try:
        layers = _write_layers(buffers, partial / "zero")
        _save(_rest(models, layers), partial / REST)
        model = _common_state(models, client_state_of_rank_0=client_state_of_rank_0)
        for name in (_MODEL_FILE, f"zero_pp_rank_0_{_MODEL_FILE}"):  # engines of every stage find theirs
            _save(model, partial / name)
        counted = next((name for name, of in layers.items() if "step" in of["scalars"]), None)
        state = {} if counted is None else {0: {"step": read_plain(partial / "zero" / counted / "step.pt")}}
        base = {"state": state, "param_groups": common["param_groups"]}
        _save(common | {"optimizer_state_dict": base}, partial / "zero" / "optimizer_state.pt")
        manifest = {"format": FORMAT, "groups": len(common["param_groups"]), "layers": layers}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(target)
    latest = target.with_name("latest_universal.partial")
    latest.write_text(target.name, encoding="utf-8")
    latest.rename(target.with_name("latest_universal"))
    return target


def read_layers(folder: Path, own: Mapping[str, tuple[list[int], int]], groups: int) -> dict[str, Any]:
    """Return the layers of a converted checkpoint, which are ``own``: every parameter as it was, and no other.

    ``own`` has, by name, the whole shape of each trained parameter and its param group, one of ``groups``.

    Raises:
        CheckpointError: it was not converted by ds-vrgd, is of another format, or is of another model or other groups.
    """
    path = folder / MANIFEST
    if not path.is_file() and (latest := folder / "latest_universal").is_file():
        inside = folder / latest.read_text(encoding="utf-8")
        raise CheckpointError(f"{folder} holds converted checkpoints, and is none itself: give {inside}")
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not converted by ds-vrgd, and DeepSpeed's own converter leaves out "
            "state. Convert the original checkpoint with ds-vrgd to-universal"
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest['format']}, and this ds_vrgd reads format {FORMAT}")
    if manifest["groups"] != groups:
        raise CheckpointError(
            f"{folder} has {manifest['groups']} param groups, and the optimizer here {groups}: build the same ones"
        )
    saved: dict[str, Any] = manifest["layers"]
    for name in sorted(own.keys() ^ saved.keys()):
        where = "the checkpoint has no" if name in own else "only the checkpoint has a"
        raise CheckpointError(f"{folder}: {where} trained parameter {name}. Train the model that was saved")
    for name, (shape, group) in own.items():
        before = saved[name]
        if shape != before["shape"]:
            raise CheckpointError(f"{folder}: {name} has shape {before['shape']}, and {shape} in this model")
        if group != before["group"]:
            raise CheckpointError(
                f"{folder}: {name} was in param group {before['group']}, and is in {group} here, whose options "
                "differ. Build the same param groups, in the same order"
            )
    return saved


def find(folder: Path, tag: str | None) -> Path:
    """Return the folder with the shards: of ``tag``, of the tag in the file ``latest``, or ``folder`` itself.

    Raises:
        CheckpointError: there is no such folder, or ``latest`` names none in ``folder``.
    """
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text(encoding="utf-8", errors="replace").strip()
        if not tag or os.path.normpath(tag) != tag or tag.startswith(("/", "..")):
            raise CheckpointError(f"{latest} is damaged: {tag[:80]!r} is no folder in {folder}. Give the tag")
    if tag is None and not any(folder.glob("*_states.pt")):
        raise CheckpointError(
            f"{folder} has neither a file 'latest' nor shards in it: give engine.save_checkpoint's folder, or a tag"
        )
    source = folder.absolute() if tag is None else folder / tag
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder: there is no checkpoint {tag!r} in {folder}")
    return source


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[_Buffer], dict[str, Any]]:
    """Return the models' files; the flat buffers, one per param group, or per sub-group at stage 3; and the options."""
    experts = CheckpointError(f"{folder} holds expert layers (MoE), which are not supported")
    if any(folder.glob("*_expert_*_model_states.pt")):  # their optimizer's files have other names, too
        raise experts
    paths, outer = _optimizer_files(folder), "optimizer_state_dict"
    ranks = [_read_file(path, {outer: dict})[outer] for path in paths]
    if ranks[0].get("ds_zero_partition_groups") is not None:
        raise experts
    first, is_stage_3 = ranks[0], _STAGE_3[0] in ranks[0]
    masters, inner = _STAGE_3 if is_stage_3 else _FLAT
    names = [f"zero_pp_rank_{rank}_{_MODEL_FILE}" for rank in range(len(paths))] if is_stage_3 else [_MODEL_FILE]
    models = [_read_file(folder / name, _MODEL) for name in names]
    for name, model in zip(names, models, strict=True):
        fragments = dict.fromkeys(model["frozen_param_shapes"] or {}, Tensor)
        _check(folder / name, "frozen_param_fragments", model["frozen_param_fragments"] or {}, fragments)
    if models[0]["dp_world_size"] != len(paths):
        raise CheckpointError(
            f"{folder} was saved by {models[0]['dp_world_size']} ranks and has optimizer files of {len(paths)}: it is "
            "incomplete, or two checkpoints were written into it. Use another one"
        )
    for path, saved in zip(paths, ranks, strict=True):
        if (_STAGE_3[0] in saved) != is_stage_3:
            raise CheckpointError(f"{path} and {paths[0]} are of different ZeRO stages: two checkpoints in one")
        _check_optimizer(path, saved, models[0]["param_shapes"], masters, inner)
    groups = first[inner]["param_groups"]
    group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
    buffers = []
    for number, shapes in enumerate(models[0]["param_shapes"]):
        layers = _in_slots(shapes, len(ranks)) if is_stage_3 else _end_to_end(folder, number, shapes, ranks)
        weights = [{"fp32": saved[masters][number].detach()} for saved in ranks]
        states = [own | saved[inner]["state"].get(number, {}) for own, saved in zip(weights, ranks, strict=True)]
        buffers.append(_Buffer(group_of[number], layers, states, [path.name for path in paths]))
    common = {key: value for key, value in first.items() if key not in _SHARDED}
    return models, buffers, common | {"param_groups": groups}


def _optimizer_files(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{path} is of a model-parallel or unknown kind of checkpoint, which is not supported"
            )
        other = found.setdefault(int(match[1]), path)
        if other is not path:
            raise CheckpointError(f"{path} and {other} are both of rank {match[1]}: two checkpoints in one")
    if not found:
        raise CheckpointError(
            f"{folder} holds no shards (*_optim_states.pt). Without ZeRO (stage 0) every rank has everything, and "
            "engine.load_checkpoint takes the checkpoint as it is at any number of ranks; else it is not a checkpoint"
        )
    if missing := sorted(set(range(max(found) + 1)) - set(found)):
        raise CheckpointError(f"{folder} has no optimizer file of rank {missing[0]}: it is incomplete. Use another one")
    return [found[rank] for rank in sorted(found)]


def _read_file(path: Path, form: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the content of one file, whose checksums and form are right; its tensors are read when they are used."""
    if path.is_file():
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint") from error
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: {damaged} in it has a wrong checksum. Use another checkpoint")
    content = read_plain(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} and no dict. Use another checkpoint")
    _check(path, "content", content, form)
    return content


def _check(path: Path, name: Any, value: Any, form: Any) -> None:
    """Check that a value in a file, ``name`` for messages, has a form.

    A form is a type, or several; a list of one form per value, or ``[form, ...]`` for any number of values; ``{key:
    form}`` for a mapping that has these keys, or ``{...: form}`` for any keys.
    """
    kinds = type(form) if isinstance(form, (list, dict)) else form
    if not isinstance(value, kinds):
        kind = kinds[0] if isinstance(kinds, tuple) else kinds
        raise CheckpointError(
            f"{path}: {name!r} is a {type(value).__name__} and must be a {kind.__name__}: the file is damaged, or not "
            "DeepSpeed's. Use another checkpoint"
        )
    if isinstance(form, list):
        forms = form[:1] * len(value) if form[1:] == [...] else form
        if len(value) != len(forms):
            raise CheckpointError(
                f"{path} has {len(value)} {name}, and the model's file has {len(forms)}: they are of two checkpoints, "
                "or damaged. Use another one"
            )
        for index, pair in enumerate(zip(value, forms, strict=True)):
            _check(path, f"{name}[{index}]", *pair)
    if isinstance(form, dict):
        for key in value if ... in form else form:
            if key not in value:
                raise CheckpointError(
                    f"{path} has no {key!r}: it is damaged, or no file of DeepSpeed's. Use another checkpoint"
                )
            _check(path, key, value[key], form.get(key, form.get(...)))


def _check_optimizer(path: Path, saved: Mapping[str, Any], shapes: list[Any], masters: str, inner: str) -> None:
    """Check that an optimizer's file has what is read from it, for every buffer of the model (see :func:`_check`)."""
    if isinstance(saved.get("base_optimizer_state"), list):
        raise CheckpointError(
            f"{path} was saved with zero_optimization.elastic_checkpoint=true, which leaves out the param groups' "
            "options. Load it with the number of ranks that saved it, and save again with elastic_checkpoint=false"
        )
    form: dict[str, Any] = {inner: _BASE, masters: [Tensor] * len(shapes)}
    if masters == _FLAT[0] and "zero_stage" in saved:
        form["group_paddings"] = [int] * len(shapes)
    if masters == _FLAT[0] and saved.get("param_alignment_paddings"):
        form["param_alignment_paddings"] = [[int] * len(of_group) for of_group in shapes]
    _check(path, "content", saved, form)
    tensors = [tensor for group in saved[inner]["param_groups"] for tensor in group["params"]]
    _check(path, "tensors in param_groups", tensors, [object] * len(shapes))


def _end_to_end(
    folder: Path, number: int, shapes: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> list[_Layer]:
    """Return the layers of a param group at stages 1 and 2, whose flat buffer was cut into equal shards."""
    # All wrappers except BF16_Optimizer cut the padding at the end off the weights, and off nothing else.
    paddings = [saved["group_paddings"][number] if "zero_stage" in saved else 0 for saved in ranks]
    sizes = {saved[_FLAT[0]][number].numel() + padding for saved, padding in zip(ranks, paddings, strict=True)}
    if len(sizes) != 1:
        raise CheckpointError(f"{folder}: the ranks' shards of param group {number} are of sizes {sorted(sizes)}")
    (size,) = sizes
    gaps = ranks[0].get("param_alignment_paddings")
    layers, begin = [], 0
    for (name, shape), gap in zip(shapes.items(), gaps[number] if gaps else [0] * len(shapes), strict=True):
        runs = runs_across(begin, math.prod(shape), size)
        pieces = [(rank, max(begin - rank * size, 0), numel) for rank, numel in runs]
        layers.append(_Layer(name, tuple(shape), pieces))
        begin += math.prod(shape) + gap
    return layers


def _in_slots(shapes: Mapping[str, Any], ranks: int) -> list[_Layer]:
    """Return the layers of a sub-group at stage 3, each cut into equal slots, one on each rank."""
    layers, start = [], 0
    for name, shape in shapes.items():
        slot = math.ceil(math.prod(shape) / ranks)
        pieces = [(rank, start, numel) for rank, numel in slots(math.prod(shape), slot, ranks)]
        layers.append(_Layer(name, tuple(shape), pieces))
        start += slot
    return layers


def _save(content: Any, path: Path) -> None:
    """Write one file; OSError where the disk takes no more, for which torch raises a RuntimeError."""
    try:
        torch.save(content, path)
    except RuntimeError as error:
        raise OSError(f"{path} could not be written ({str(error).splitlines()[0]}): is the disk full?") from error


def _write_layers(buffers: Sequence[_Buffer], folder: Path) -> dict[str, Any]:
    """Write every parameter and its state, and return what was written, by parameter."""
    written: dict[str, Any] = {}
    for buffer in (buffer for buffer in buffers if buffer.layers):
        keys, scalars = _kinds(buffer)
        kinds = {"states": sorted(keys), "scalars": sorted(scalars)}
        for layer in buffer.layers:
            if layer.name in written:
                raise CheckpointError(f"{layer.name} is in the checkpoint twice")
            (folder / layer.name).mkdir()
            for key in ("fp32", *keys):
                whole = _whole(layer, key, [state.get(key) for state in buffer.states], buffer.files)
                _save({"param": whole, "cat_dim": 0}, folder / layer.name / f"{key}.pt")
            for key, value in scalars.items():
                _save(value, folder / layer.name / f"{key}.pt")
            written[layer.name] = {"group": buffer.group, "shape": list(layer.shape)} | kinds
    return written


def _kinds(buffer: _Buffer) -> tuple[set[str], dict[str, Any]]:
    """Return the names of the buffer's per-element states, and its scalars by name."""
    filled = sorted({rank for layer in buffer.layers for rank, _, _ in layer.pieces})
    where = f"of the buffer that begins with {buffer.layers[0].name}"
    per_element: set[str] = set()
    scalars: dict[str, Any] = {}
    for rank in filled:
        for key, value in buffer.states[rank].items():
            is_number = isinstance(value, (Tensor, int, float))
            if isinstance(value, Tensor) and value.dim() > 0:
                per_element.add(key)
            elif value is not None and not (is_number and scalars.setdefault(key, value) == value):
                raise CheckpointError(
                    f"{buffer.files[rank]}: state {key}={value!r} {where} is no number, or differs between ranks: it "
                    "cannot be carried over"
                )
    for rank in filled:
        if missing := sorted((per_element | set(scalars)) - set(buffer.states[rank])):
            raise CheckpointError(
                f"{buffer.files[rank]}: rank {rank} has no state {missing[0]} {where}, and other ranks have"
            )
    return per_element - {"fp32"}, scalars


def _whole(layer: _Layer, key: str, shards: Sequence[Any], files: Sequence[str]) -> Tensor:
    """Return one parameter, or one state of it, in its shape."""
    what, runs = f"{key} of {layer.name}", []
    for rank, start, numel in layer.pieces:
        size = shards[rank].numel() if isinstance(shards[rank], Tensor) else 0
        if size < start + numel:
            raise CheckpointError(
                f"{files[rank]}: {what} on rank {rank} has {size} elements, and must have {start + numel}: the shards "
                "are not per element, or another checkpoint's"
            )
        runs.append(shards[rank].flatten()[start : start + numel])
        _require_numbers(runs[-1], f"{files[rank]}: {what}", finite=key == "fp32")
    if sum(numel for _, _, numel in layer.pieces) != math.prod(layer.shape):
        raise CheckpointError(f"{what} is incomplete in the checkpoint")
    return (torch.cat(runs) if runs else torch.empty(0)).view(layer.shape)


def _require_numbers(values: Tensor, what: str, *, finite: bool = True) -> None:
    """Check that no value is NaN, and that none is infinite, which a second moment may be."""
    if not bool(values.isfinite().all() if finite else ~values.isnan().any()):
        raise CheckpointError(
            f"{what} holds NaN or infinity: the run had failed before it was saved. Use an earlier checkpoint"
        )


def _rest(models: Sequence[Mapping[str, Any]], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the frozen weights and the buffers, by name."""
    model = models[0]
    buffers, aliases = set(model["buffer_names"]), set(dict(model["shared_params"] or {}))  # it may be a list of pairs
    frozen = model["frozen_param_shapes"] or {}
    rest: dict[str, Tensor] = {}
    for name, value in model["module"].items():
        if name in layers or name in aliases:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} in the model's state is no tensor but {type(value).__name__}: not supported")
        shape = tuple(frozen.get(name, value.shape))
        if tuple(value.shape) == shape:
            rest[name] = value.detach().clone()
        else:  # stage 3 cuts frozen weights, too
            pieces = [saved["frozen_param_fragments"][name].flatten() for saved in models]
            rest[name] = torch.cat(pieces)[: math.prod(shape)].view(shape).clone()
    for name, value in rest.items():
        if name not in buffers:
            _require_numbers(value, f"the frozen weight {name}")
    return rest


def _common_state(models: Sequence[Mapping[str, Any]], *, client_state_of_rank_0: bool) -> dict[str, Any]:
    """Return what belongs to no parameter: client state, schedule, counts."""
    common = {key: value for key, value in models[0].items() if key not in _NOT_READ}
    for rank, other in enumerate(models[1:], start=1):
        for key, value in common.items():
            if not client_state_of_rank_0 and not same(value, other.get(key)):
                raise CheckpointError(
                    f"client state {key!r} of rank {rank} differs from rank 0's, and another number of ranks cannot "
                    "have both: keep what belongs to one rank in files of your own, or take rank 0's for all "
                    "(--client-state-of-rank-0)"
                )
    return common | {"module": {}}


def same(one: Any, other: Any) -> bool:
    """Return whether two client states hold equal values; NaN equals NaN, and 1 is not True."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, (Tensor, numpy.ndarray)):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other) or (one != one and other != other)
