"""Load what :func:`~ds_vrgd.zero.universal.to_universal` wrote into an engine of any number of ranks.

Takes the place of upstream's loader on the wrapper of an engine that has one of our optimizers. Upstream's takes
whatever files it finds at stages 1 and 2, and at stage 3 three fixed ones, one ``step`` for all sub-groups to count
up in turn, and the first param group's options for all.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_vrgd.moments import ShardLayout
from ds_vrgd.zero.observer import observer_of
from ds_vrgd.zero.saved import CheckpointError
from ds_vrgd.zero.universal import FORMAT, MANIFEST, REST

Engine = Any


class _Shard(NamedTuple):
    group: int
    tensor: Tensor
    layout: ShardLayout


def load_instead(engine: Engine) -> None:
    """Have the engine's wrapper load universal checkpoints with :func:`load_universal`."""
    if not hasattr(engine.optimizer, "_load_universal_checkpoint"):
        return  # without ZeRO there is nothing to convert; see refusals.py

    def load(checkpoint_folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool) -> None:
        load_universal(engine, Path(checkpoint_folder), load_optimizer_states=load_optimizer_states)

    engine.optimizer._load_universal_checkpoint = load


def load_universal(engine: Engine, folder: Path, *, load_optimizer_states: bool = True) -> None:
    """Take weights, every state, options, loss scale, frozen weights and buffers from a universal checkpoint.

    The weights are always the fp32 masters; the engine casts them to the model's dtype. A collective: what one rank
    alone finds wrong, all ranks raise, before anything is changed.

    Args:
        engine: with one of our optimizers, at ZeRO stage 1, 2 or 3.
        folder: ``output/<tag>`` of :func:`~ds_vrgd.zero.universal.to_universal`.
        load_optimizer_states: False for weights and buffers alone.

    Raises:
        CheckpointError: something of the model or of the state is missing, or is too many, or is another's, or the
            optimizer cannot continue that state (see ``VROptimizer.load_state_dict``).
    """
    with _together():
        shards = list(_shards(engine))
        content = _read_all(engine, folder, shards, load_optimizer_states=load_optimizer_states)
    with _together():
        _apply(engine, shards, content)


@contextmanager
def _together() -> Iterator[None]:
    """What any rank raises inside, all ranks raise at its end."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    said: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, None if problem is None else str(problem) or repr(problem))
    for rank, text in enumerate(said):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}") from problem


class _Content(NamedTuple):
    """Of a checkpoint, for one rank: by shard the weights and the state (None not to load it), and what is in none."""

    masters: list[Tensor]
    states: list[dict[str, Any]] | None
    common: dict[str, Any]
    rest: dict[str, Tensor]


def _read_all(engine: Engine, folder: Path, shards: list[_Shard], *, load_optimizer_states: bool) -> _Content:
    """Read everything, and change nothing."""
    manifest = _manifest(folder)
    _check_layers(engine, folder, manifest, shards)
    rest = torch.load(folder / REST, map_location="cpu", weights_only=True)
    _check_rest(engine, folder, rest)
    common = torch.load(folder / "zero" / "optimizer_state.pt", map_location="cpu", weights_only=False)
    states = [_state(folder, manifest, shard) for shard in shards] if load_optimizer_states else None
    return _Content([_read(folder, shard, "fp32") for shard in shards], states, common, rest)


def _apply(engine: Engine, shards: list[_Shard], content: _Content) -> None:
    wrapper, is_stage_3 = engine.optimizer, isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3)
    if content.states is not None:
        state = {index: of for index, of in enumerate(content.states) if of}
        _load_state(wrapper, state, content.common, is_stage_3=is_stage_3)
    for shard, master in zip(shards, content.masters, strict=True):
        shard.tensor.data.copy_(master)
    if is_stage_3:
        for sub_group in range(len(shards)):
            wrapper._reassign_or_swap_out_partitioned_parameters(sub_group)
    else:  # the engine itself calls update_lp_params()
        wrapper._link_all_hp_params()
    _load_rest(engine, content.rest)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not converted by ds-vrgd, and DeepSpeed's own converter leaves out "
            "state. Convert the original checkpoint with ds-vrgd to-universal"
        )
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise CheckpointError(f"{path} is of format {manifest['format']}, and this ds_vrgd reads format {FORMAT}")
    return manifest


def _shards(engine: Engine) -> Iterator[_Shard]:
    """The optimizer's tensors on this rank, in the order of its param groups."""
    wrapper = engine.optimizer
    observer = observer_of(engine)
    for index, tensor in enumerate(observer.tensors):
        group = wrapper.sub_group_to_group_id[index] if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3) else index
        yield _Shard(group, tensor, observer.layout(tensor))


def _check_layers(engine: Engine, folder: Path, manifest: dict[str, Any], shards: list[_Shard]) -> None:
    """Every parameter is there, in its shape and group, and no other one."""
    shapes = {name: list(getattr(param, "ds_shape", param.shape)) for param, name in engine.param_names.items()}
    saved, groups = manifest["layers"], len(engine.basic_optimizer.param_groups)
    if manifest["groups"] != groups:
        raise CheckpointError(
            f"{folder} has {manifest['groups']} param groups, and this engine {groups}: build the same ones"
        )
    own = {layer.name: shard.group for shard in shards for layer in shard.layout.layers}
    for name in sorted(own.keys() ^ saved.keys()):
        where = "the checkpoint has no" if name in own else "only the checkpoint has a"
        raise CheckpointError(f"{folder}: {where} trained parameter {name}. Train the model that was saved")
    for name, group in own.items():
        if shapes[name] != saved[name]["shape"]:
            raise CheckpointError(
                f"{folder}: {name} has shape {saved[name]['shape']}, and {shapes[name]} in this model"
            )
        if group != saved[name]["group"]:
            raise CheckpointError(
                f"{folder}: {name} was in param group {saved[name]['group']}, and is in {group} here, whose options "
                "differ. Build the same param groups, in the same order"
            )


def _state(folder: Path, manifest: dict[str, Any], shard: _Shard) -> dict[str, Any]:
    """The state of one shard; its padding is 0."""
    first, *others = [layer.name for layer in shard.layout.layers]
    expected = manifest["layers"][first]
    state: dict[str, Any] = {key: _read(folder, shard, key) for key in expected["states"]}
    state |= {key: _scalar(folder, first, key) for key in expected["scalars"]}
    for name in others:
        saved = manifest["layers"][name]
        if any(saved[kind] != expected[kind] for kind in ("states", "scalars")):
            raise CheckpointError(
                f"{folder}: {first} has the states {expected['states'] + expected['scalars']}, and {name}, which "
                f"shares its shard here, {saved['states'] + saved['scalars']}"
            )
        for key in expected["scalars"]:
            if (value := _scalar(folder, name, key)) != state[key]:
                raise CheckpointError(
                    f"{folder}: {key} of {first} is {state[key]}, and {value} of {name}, which shares its shard here"
                )
    return state


def _scalar(folder: Path, name: str, key: str) -> Any:
    return _open(folder / "zero" / name / f"{key}.pt")


def _read(folder: Path, shard: _Shard, key: str) -> Tensor:
    """This rank's elements of the weights or of one state, flat; 0 where no parameter is."""
    flat: Tensor | None = None
    pieces = {segment.layer: segment for segment in shard.layout.segments}
    for index, layer in enumerate(shard.layout.layers):
        if flat is not None and index not in pieces:
            continue  # the first one also tells the dtype
        path = folder / "zero" / layer.name / f"{key}.pt"
        whole = _open(path)["param"].flatten()
        if whole.numel() != layer.numel:
            raise CheckpointError(f"{path} has {whole.numel()} elements, and must have {layer.numel}")
        if flat is None:
            flat = torch.zeros(shard.layout.numel, dtype=whole.dtype)
        if index in pieces:
            piece = pieces[index]
            flat[piece.start : piece.start + piece.numel] = whole[piece.first : piece.first + piece.numel]
    assert flat is not None
    return flat


def _open(path: Path) -> Any:
    """A file of the folder, of which only what is used is read."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the converted checkpoint is incomplete. Convert it again")
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _load_state(wrapper: Any, state: dict[int, Any], common: dict[str, Any], *, is_stage_3: bool) -> None:
    """State and options through the optimizer's own ``load_state_dict``; then loss scale and clipping."""
    if is_stage_3:
        wrapper._set_fp32_optimizer_param_groups()
    try:
        numbers = itertools.count()
        groups = [
            {**saved, "params": [next(numbers) for _ in own["params"]]}
            for own, saved in zip(wrapper.optimizer.param_groups, common["param_groups"], strict=True)
        ]
        wrapper.optimizer.load_state_dict({"state": state, "param_groups": groups})
    finally:
        if is_stage_3:
            wrapper._clear_fp32_optimizer_param_groups()
    is_dynamic, was_dynamic = (getattr(wrapper, "dynamic_loss_scale", False), common.get("dynamic_loss_scale", False))
    if is_dynamic == was_dynamic:
        (wrapper._load_global_state_stage3 if is_stage_3 else wrapper._load_global_state)(common)
    else:
        logger.warning(
            f"the checkpoint was saved {'with' if was_dynamic else 'without'} a dynamic loss scale, and this engine "
            "trains in another dtype: its own loss scale is kept"
        )


def _others(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
    """Frozen parameters, by the names of the engine, and buffers that belong to the model's state."""
    trained = {layer.name for shard in _shards(engine) for layer in shard.layout.layers}
    frozen = {name: param for param, name in engine.param_names.items() if name not in trained}
    saved = engine.module.state_dict(keep_vars=True)
    buffers = {
        name: value
        for name, value in saved.items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
    }
    return frozen, buffers


def _check_rest(engine: Engine, folder: Path, rest: dict[str, Tensor]) -> None:
    frozen, buffers = _others(engine)
    if frozen and not any(name in rest for name in frozen):
        logger.warning(f"{folder} was saved without frozen weights: those of this model are kept as they are")
        frozen = {}
    for name, own in (frozen | buffers).items():
        if name not in rest:
            raise CheckpointError(f"{folder} has no {name}, which this model has frozen or as a buffer")
        if tuple(rest[name].shape) != tuple(getattr(own, "ds_shape", own.shape)):
            raise CheckpointError(f"{folder}: {name} has shape {tuple(rest[name].shape)}, and another in this model")


def _load_rest(engine: Engine, rest: dict[str, Tensor]) -> None:
    frozen, buffers = _others(engine)
    for name, own in (frozen | buffers).items():
        if name not in rest:
            continue
        if not hasattr(own, "ds_tensor"):
            own.data.copy_(rest[name])
            continue
        slot = own.ds_tensor.numel()
        begin = slot * torch.distributed.get_rank(own.ds_process_group)
        mine = rest[name].flatten()[begin : begin + slot]
        own.ds_tensor.data.flatten()[: mine.numel()].copy_(mine)
