"""Carry a ZeRO checkpoint over to another number of ranks, with every element of every state.

Upstream's ``ds_to_universal`` knows Adam's states alone, and its loader gives all param groups the first one's options
at stage 3 and leaves frozen weights and buffers as they are. The folders that are written here are in upstream's
layout, one file a parameter and state, with a list of what must be there; ``ds_vrgd.zero.restore`` loads them.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.zero.saved import CheckpointError, SavedBuffer, SavedLayer, SavedRun, read_run

MANIFEST = "ds_vrgd_universal.json"
#: Frozen weights and buffers, by name.
REST = "rest.pt"
FORMAT = 1

#: What the engine puts into a model's file and is not read from a universal checkpoint.
_NOT_READ = {"module", "frozen_param_fragments", "frozen_param_shapes", "param_shapes", "shared_params"}


def to_universal(
    folder: str | Path, output: str | Path, tag: str | None = None, *, client_state_of_rank_0: bool = False
) -> Path:
    """Convert a checkpoint of ZeRO stages 1 to 3 into one that any number of ranks load, at any of these stages.

    Every per-element state is kept, whatever its name, with ``step`` and every option of the param groups, and so are
    the loss scale, frozen weights, buffers (rank 0's), schedule and client state. Padding is not. An engine with one of
    this package's optimizers, over the same model and param groups, loads the result when its DeepSpeed JSON says
    ``"checkpoint": {"load_universal": true}``::

        engine.load_checkpoint(output)

    Needs no engine and no GPU: one process, which holds one parameter in memory at a time. A checkpoint of stage 0
    needs no conversion.

    Args:
        folder: what ``engine.save_checkpoint`` was given, or a folder with the shards themselves.
        output: to be made, or to get one more tag; the result is ``output/<tag>``.
        tag: of the checkpoint; None for the one that ``latest`` names.
        client_state_of_rank_0: at stage 3 every rank saves the client state that it was given. Where they differ,
            take rank 0's for all; else that is an error.

    Returns:
        The folder that was written, complete: until it is, it has another name.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, holds something that cannot be carried over,
            or the result exists already.
    """
    source = _find(Path(folder), tag)
    target = Path(output) / source.name
    if target.exists():
        raise CheckpointError(f"{target} exists already: give another output folder, or remove it")
    run = read_run(source)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "zero").mkdir(parents=True)
    layers = _write_layers(run.buffers, partial / "zero")
    torch.save(_rest(run, layers), partial / REST)
    _write_common(run, layers, partial, client_state_of_rank_0=client_state_of_rank_0)
    manifest = {"format": FORMAT, "groups": len(run.groups), "layers": layers}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.rename(target)
    latest = target.with_name("latest_universal.partial")
    latest.write_text(target.name, encoding="utf-8")
    latest.rename(target.with_name("latest_universal"))
    return target


def _find(folder: Path, tag: str | None) -> Path:
    if tag is None and (folder / "latest").is_file():
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
    if tag is None and not any(folder.glob("*_states.pt")):
        raise CheckpointError(
            f"{folder} has neither a file 'latest' nor shards in it: give the folder that engine.save_checkpoint was "
            "given, or a tag"
        )
    source = folder.absolute() if tag is None else folder / tag
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder: there is no checkpoint {tag!r} in {folder}")
    return source


def _write_layers(buffers: Iterable[SavedBuffer], folder: Path) -> dict[str, Any]:
    """Write every parameter and its state; returns what there is, by parameter."""
    written: dict[str, Any] = {}
    for buffer in buffers:
        keys, scalars = _kinds(buffer)
        for layer in buffer.layers:
            if layer.name in written:
                raise CheckpointError(f"{layer.name} is in the checkpoint twice")
            place = folder / layer.name
            place.mkdir()
            _write_whole(layer, buffer.masters, place / "fp32.pt")
            for key in keys:
                _write_whole(layer, [state.get(key) for state in buffer.states], place / f"{key}.pt")
            for key, value in scalars.items():
                torch.save(value, place / f"{key}.pt")
            written[layer.name] = {
                "group": buffer.group,
                "shape": list(layer.shape),
                "states": sorted(keys),
                "scalars": sorted(scalars),
            }
    return written


def _kinds(buffer: SavedBuffer) -> tuple[set[str], dict[str, Any]]:
    """The buffer's per-element states, and those that it has one of."""
    filled = {piece.rank for layer in buffer.layers for piece in layer.pieces}
    first = buffer.layers[0].name
    per_element: set[str] = set()
    scalars: dict[str, Any] = {}
    for rank in sorted(filled):
        for key, value in buffer.states[rank].items():
            if value is None:
                continue
            if isinstance(value, Tensor) and value.dim() > 0:
                per_element.add(key)
                continue
            if not isinstance(value, (Tensor, int, float)) or scalars.setdefault(key, value) != value:
                raise CheckpointError(
                    f"state {key}={value!r} of the buffer that begins with {first} is no number, or differs between "
                    "ranks: it cannot be carried over"
                )
    for rank in sorted(filled):
        if missing := sorted((per_element | set(scalars)) - set(buffer.states[rank])):
            raise CheckpointError(
                f"rank {rank} has no state {missing[0]} of the buffer that begins with {first}, and other ranks have"
            )
    return per_element, scalars


def _write_whole(layer: SavedLayer, shards: list[Any], path: Path) -> None:
    """Put one parameter, or one state of it, together, and write it in upstream's layout."""
    for piece in layer.pieces:
        if not isinstance(shards[piece.rank], Tensor) or shards[piece.rank].numel() < piece.start + piece.numel:
            size = shards[piece.rank].numel() if isinstance(shards[piece.rank], Tensor) else 0
            raise CheckpointError(
                f"{path.stem} of {layer.name} on rank {piece.rank} has {size} elements, and must have "
                f"{piece.start + piece.numel}: the shards are not per element, or another checkpoint's"
            )
    if sum(piece.numel for piece in layer.pieces) != math.prod(layer.shape):
        raise CheckpointError(f"{path.stem} of {layer.name} is incomplete in the checkpoint")
    torch.save({"param": layer.whole(shards).clone(), "cat_dim": 0}, path)


def _rest(run: SavedRun, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Frozen weights and buffers."""
    model = run.models[0]
    buffers = set(model["buffer_names"])
    aliases = set(_pairs(model["shared_params"]))
    rest: dict[str, Tensor] = {}
    for name, value in model["module"].items():
        if name in layers or name in aliases:
            continue
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} in the model's state is no tensor but {type(value).__name__}: not supported")
        if name in buffers or len(run.models) == 1:
            rest[name] = value.detach().clone()
    if len(run.models) > 1:  # stage 3, which cuts frozen weights, too
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            pieces = [saved["frozen_param_fragments"][name].flatten() for saved in run.models]
            rest[name] = torch.cat(pieces)[: math.prod(shape)].view(tuple(shape)).clone()
    return rest


def _pairs(shared: Any) -> dict[str, str]:
    """Names that share another one's tensor: a dict, or a list of pairs, by DeepSpeed's version."""
    return dict(shared or {})


def _write_common(run: SavedRun, layers: Mapping[str, Any], folder: Path, *, client_state_of_rank_0: bool) -> None:
    """Write what belongs to no parameter, under the names that engines of every stage look for."""
    model = {key: value for key, value in run.models[0].items() if key not in _NOT_READ}
    for rank, other in enumerate(run.models[1:], start=1):
        for key, value in model.items():
            if not client_state_of_rank_0 and not _same(value, other.get(key)):
                raise CheckpointError(
                    f"client state {key!r} of rank {rank} differs from rank 0's, and another number of ranks cannot "
                    "have both: keep what belongs to one rank in files of your own, or take rank 0's for all "
                    "(--client-state-of-rank-0)"
                )
    model["module"] = {}
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        torch.save(model, folder / name)
    counted = next((name for name, of in layers.items() if "step" in of["scalars"]), None)
    state = {} if counted is None else {0: {"step": torch.load(folder / "zero" / counted / "step.pt")}}
    base = {"state": state, "param_groups": run.groups}
    common = run.common | {"param_groups": run.groups, "optimizer_state_dict": base}
    torch.save(common, folder / "zero" / "optimizer_state.pt")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return pickle.dumps(one) == pickle.dumps(other)
