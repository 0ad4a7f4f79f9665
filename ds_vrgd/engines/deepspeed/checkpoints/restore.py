"""Load what :func:`~ds_vrgd.engines.deepspeed.to_universal` wrote into an engine of any number of ranks.

Replaces upstream's loader on the wrapper of an engine that has one of our optimizers. Upstream's takes
whatever files it finds at stages 1 and 2, and at stage 3 three fixed ones, one ``step`` for all sub-groups to count
up in turn, and the first param group's options for all.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_vrgd.engines.deepspeed.checkpoints.safe_load import CheckpointError, read_plain, run_nothing
from ds_vrgd.engines.deepspeed.checkpoints.universal import REST, read_layers
from ds_vrgd.engines.deepspeed.observer import observer_of
from ds_vrgd.engines.deepspeed.parallel import Engine
from ds_vrgd.moments import ShardLayout, gathered
from ds_vrgd.optim import world

_GUARDED = "_ds_vrgd_guarded"


class _Shard(NamedTuple):
    group: int
    tensor: Tensor
    layout: ShardLayout


def load_instead(engine: Engine) -> None:
    """Have the engine read plain values alone, and its wrapper load universal checkpoints with ours."""
    guard_loading(engine)
    if hasattr(engine.optimizer, "_load_universal_checkpoint"):  # without ZeRO nothing is converted; see refusals.py

        def load(folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool) -> None:
            load_universal(engine, Path(folder), load_optimizer_states=load_optimizer_states)

        engine.optimizer._load_universal_checkpoint = load


def guard_loading(engine: Engine) -> None:
    """Have ``engine.load_checkpoint`` run nothing that a file names; later calls do nothing.

    DeepSpeed reads checkpoints with ``torch.load(weights_only=False)``. Each rank first reads a share of the files
    without their tensors, so that all ranks raise the same CheckpointError, before anything is loaded. DeepSpeed then
    reads them under the same restriction, and as :func:`_load` has it.
    """
    load = engine.load_checkpoint
    if hasattr(load, _GUARDED):
        return

    @functools.wraps(load)
    def guarded(load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        with _together() as (rank, size):
            for path in _files_to_read(engine, Path(load_dir), tag)[rank::size]:
                read_plain(path)
        try:
            with run_nothing():
                return _load(engine, load, load_dir, tag, *args, **kwargs)
        except pickle.UnpicklingError as error:  # a file that not all ranks can see, or that has just been replaced
            raise CheckpointError(f"{load_dir}: {str(error).splitlines()[0]}") from error

    setattr(guarded, _GUARDED, True)
    engine.load_checkpoint = guarded


def _load(engine: Engine, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call DeepSpeed's ``load_checkpoint``, and where the weights alone are asked for, have it load just these.

    At stage 3 it collects them only with ``load_optimizer_states=False``, not with ``load_module_only``, and from the
    checkpoint that ``latest`` names, whatever the tag; of a universal one :func:`load_universal` brings them. In bf16
    without ZeRO it keeps the old masters, and the next step would bring back the old weights.
    """
    asked = inspect.signature(load).bind(*args, **kwargs)
    asked.apply_defaults()
    options, collect = asked.arguments, engine_module.get_fp32_state_dict_from_zero_checkpoint
    if options.get("load_optimizer_states", True) and not options.get("load_module_only", False):
        return load(*args, **kwargs)
    tag, universal = options["tag"], engine.load_universal_checkpoint()
    options["load_optimizer_states"] = False
    engine_module.get_fp32_state_dict_from_zero_checkpoint = lambda folder: {} if universal else collect(folder, tag)
    try:
        found = load(*asked.args, **asked.kwargs)
    finally:
        engine_module.get_fp32_state_dict_from_zero_checkpoint = collect
    if found[0] is not None and isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        engine.optimizer.refresh_fp32_params()
    return found


def _files_to_read(engine: Engine, folder: Path, tag: str | None) -> list[Path]:
    """Return the files of a checkpoint that hold pickles; none where DeepSpeed would find no checkpoint."""
    if tag is None:
        plain, converted = folder / "latest", folder / "latest_universal"
        latest = converted if engine.load_universal_checkpoint() else plain
        if not latest.is_file():
            if plain.is_file():
                raise CheckpointError(
                    f'{folder} is not converted, and "checkpoint": {{"load_universal": true}} asks for a checkpoint '
                    "that is: convert it with ds-vrgd to-universal, or leave load_universal out"
                )
            if converted.is_file():  # DeepSpeed would warn, and train from scratch
                raise CheckpointError(
                    f'{folder} is a converted checkpoint: set "checkpoint": {{"load_universal": true}} in the '
                    "DeepSpeed JSON"
                )
            return []
        tag = latest.read_text(encoding="utf-8").strip()
    return sorted([*(folder / str(tag)).glob("*.pt"), *(folder / str(tag)).glob("zero/*.pt")])


@contextmanager
def _together() -> Iterator[tuple[int, int]]:
    """Have every rank raise at the end what any rank raised inside; gives this rank, and how many there are."""
    group, problem = world.group(), None
    try:
        yield (0, 1) if group is None else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    except Exception as error:
        problem = error
    own = None if problem is None else str(problem) or repr(problem)
    for rank, text in enumerate(gathered(own, group)):
        if text is not None:
            raise CheckpointError(f"rank {rank}: {text}") from problem


def load_universal(engine: Engine, folder: Path, *, load_optimizer_states: bool = True) -> None:
    """Load weights, every state, options, loss scale, frozen weights and buffers from a universal checkpoint.

    The weights are the fp32 masters; the engine, at ZeRO stage 1, 2 or 3, casts them to the model's dtype. A
    collective: what one rank finds wrong, all ranks raise, before anything is changed. ``folder`` is the
    ``output/<tag>`` of :func:`~ds_vrgd.engines.deepspeed.to_universal`.

    Raises:
        CheckpointError: something of the model or of the state is missing, or is too many, or is another's, or the
            optimizer cannot continue that state (see ``VROptimizer.load_state_dict``).
    """
    wrapper, observer = engine.optimizer, observer_of(engine)
    is_stage_3 = isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3)
    with _together():
        group_of = wrapper.sub_group_to_group_id if is_stage_3 else range(len(observer.tensors))
        shards = [_Shard(group_of[i], tensor, observer.layout(tensor)) for i, tensor in enumerate(observer.tensors)]
        shapes = {name: list(getattr(param, "ds_shape", param.shape)) for param, name in engine.param_names.items()}
        mine = {layer.name: (shapes[layer.name], shard.group) for shard in shards for layer in shard.layout.layers}
        layers = read_layers(folder, mine, len(engine.basic_optimizer.param_groups))
        rest = _rest(engine, folder, layers)
        common = read_plain(folder / "zero" / "optimizer_state.pt")
        states = [_state(folder, layers, shard) for shard in shards] if load_optimizer_states else None
        masters = [_read(folder, shard, "fp32") for shard in shards]
    with _together():
        if states is not None:
            _load_state(wrapper, {i: state for i, state in enumerate(states) if state}, common, is_stage_3=is_stage_3)
        for shard, master in zip(shards, masters, strict=True):
            shard.tensor.data.copy_(master)
        if is_stage_3:
            for sub_group in range(len(shards)):
                wrapper._reassign_or_swap_out_partitioned_parameters(sub_group)
        else:  # the engine itself calls update_lp_params()
            wrapper._link_all_hp_params()
    for own, value in rest:
        with deepspeed.zero.GatheredParameters([own], modifier_rank=0):  # stage 3 cuts frozen weights, too
            own.data.copy_(value)


def _rest(engine: Engine, folder: Path, layers: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the model's frozen weights and the buffers that belong to its state, each with its value to come."""
    rest = read_plain(folder / REST)
    frozen = {name: param for param, name in engine.param_names.items() if name not in layers}
    if frozen and not any(name in rest for name in frozen):
        logger.warning(f"{folder} was saved without frozen weights: those of this model are kept as they are")
        frozen = {}
    state = engine.module.state_dict(keep_vars=True).items()
    buffers = {name: own for name, own in state if isinstance(own, Tensor) and not isinstance(own, nn.Parameter)}
    for name, own in (frozen | buffers).items():
        if name not in rest:
            raise CheckpointError(f"{folder} has no {name}, which this model has frozen or as a buffer")
        if tuple(rest[name].shape) != tuple(getattr(own, "ds_shape", own.shape)):
            raise CheckpointError(f"{folder}: {name} has shape {tuple(rest[name].shape)}, and another in this model")
    return [(own, rest[name]) for name, own in (frozen | buffers).items()]


def _state(folder: Path, layers: dict[str, Any], shard: _Shard) -> dict[str, Any]:
    """Return the state of one shard; its padding is 0."""
    first, *others = [layer.name for layer in shard.layout.layers]
    states, names = layers[first]["states"], layers[first]["scalars"]
    scalars = {key: read_plain(folder / "zero" / first / f"{key}.pt") for key in names}
    for name in others:
        saved = layers[name]
        if (saved["states"], saved["scalars"]) != (states, names):
            raise CheckpointError(
                f"{folder}: {first} has the states {states + names}, and {name}, which shares its shard here, "
                f"{saved['states'] + saved['scalars']}"
            )
        for key, value in scalars.items():
            if (other := read_plain(folder / "zero" / name / f"{key}.pt")) != value:
                raise CheckpointError(
                    f"{folder}: {key} of {first} is {value}, and {other} of {name}, which shares its shard here"
                )
    return {key: _read(folder, shard, key) for key in states} | scalars


def _read(folder: Path, shard: _Shard, key: str) -> Tensor:
    """Return this rank's elements of the weights or of one state, flat; 0 where there is no parameter."""
    flat: Tensor | None = None
    pieces = {segment.layer: segment for segment in shard.layout.segments}
    for index, layer in enumerate(shard.layout.layers):
        if flat is None or index in pieces:  # the first one is read for the dtype, too
            path = folder / "zero" / layer.name / f"{key}.pt"
            whole = read_plain(path)["param"].flatten()
            if whole.numel() != layer.numel:
                raise CheckpointError(f"{path} has {whole.numel()} elements, and must have {layer.numel}")
            flat = torch.zeros(shard.layout.numel, dtype=whole.dtype) if flat is None else flat
        if index in pieces:
            piece = pieces[index]
            flat[piece.start : piece.start + piece.numel] = whole[piece.first : piece.first + piece.numel]
    assert flat is not None
    return flat


def _load_state(wrapper: Any, state: dict[int, Any], common: dict[str, Any], *, is_stage_3: bool) -> None:
    """Load state and options through the optimizer's own ``load_state_dict``, then loss scale and clipping."""
    optimizer = wrapper.optimizer
    if is_stage_3:
        wrapper._set_fp32_optimizer_param_groups()
    try:
        pairs = zip(optimizer.state_dict()["param_groups"], common["param_groups"], strict=True)
        groups = [{**saved, "params": group["params"]} for group, saved in pairs]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    finally:
        if is_stage_3:
            wrapper._clear_fp32_optimizer_param_groups()
    common = {"ds_version": deepspeed.__version__} | common  # stage 3 saves none, and stages 1 and 2 want one
    was_dynamic = common.get("dynamic_loss_scale", False)
    if getattr(wrapper, "dynamic_loss_scale", False) == was_dynamic:
        (wrapper._load_global_state_stage3 if is_stage_3 else wrapper._load_global_state)(common)
    else:
        logger.warning(
            f"the checkpoint was saved {'with' if was_dynamic else 'without'} a dynamic loss scale, and this engine "
            "trains in another dtype: its own loss scale is kept"
        )
