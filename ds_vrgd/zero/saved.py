"""A checkpoint of DeepSpeed's as it lies on disk: which file holds which element of which parameter.

DeepSpeed writes flat shards without names in them. What is where follows from ``param_shapes`` in the model's file,
whose order is that of the shards also with ``round_robin_gradients`` (upstream's own ``param_slice_mappings`` are wrong
there), from the number of ranks, and from the padding between parameters.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, damaged, or none that can be carried over without loss."""


class Piece(NamedTuple):
    """A run of a parameter's elements: on which rank, and where in its shard."""

    rank: int
    start: int
    numel: int


@dataclass(frozen=True)
class SavedLayer:
    """A parameter in a flat buffer; its pieces one behind the other are the whole of it.

    Attributes:
        name: of the parameter in the model.
        shape: of the parameter.
        pieces: in ascending order of elements; none of no elements.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """The parameter, or a state of it, from the ranks' flat shards."""
        runs = [shards[piece.rank].flatten()[piece.start : piece.start + piece.numel] for piece in self.pieces]
        return torch.cat(runs).view(self.shape) if runs else torch.empty(self.shape)


@dataclass(frozen=True)
class SavedBuffer:
    """A flat buffer that was cut over the ranks: a param group, or at stage 3 a part of one.

    Attributes:
        group: index of its param group.
        layers: the parameters in it.
        masters: fp32 weights, one shard a rank.
        states: optimizer state, one dict a rank.
    """

    group: int
    layers: tuple[SavedLayer, ...]
    masters: list[Tensor]
    states: list[dict[str, Any]]


@dataclass(frozen=True)
class SavedRun:
    """Everything that a checkpoint holds.

    Attributes:
        buffers: the trained parameters and their state.
        groups: options of the param groups.
        models: the model's file of every rank that wrote one.
        common: what the optimizer's file of rank 0 holds besides shards: loss scale, clipping, version.
    """

    buffers: list[SavedBuffer]
    groups: list[dict[str, Any]]
    models: list[dict[str, Any]]
    common: dict[str, Any]


def read_file(path: Path) -> dict[str, Any]:
    """One file of a checkpoint; its tensors are read when they are used.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another one")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{path} is damaged ({error}). Use another checkpoint") from error
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: {damaged} in it has a wrong checksum. Use another checkpoint")
    # DeepSpeed's files hold objects of its own, so there is no loading weights alone.
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return content


def read_run(folder: Path) -> SavedRun:
    """Read a checkpoint: the folder with the shards in it.

    Raises:
        CheckpointError: files are missing, damaged or too many, or something in them could not be carried over.
    """
    if any(folder.glob("*_expert_*_model_states.pt")):
        raise CheckpointError(f"{folder} holds expert layers (MoE), which are not supported")
    paths = _optimizer_files(folder)
    optimizers = [read_file(path)["optimizer_state_dict"] for path in paths]
    is_stage_3 = "fp32_flat_groups" in optimizers[0]
    names = [f"zero_pp_rank_{rank}_" if is_stage_3 else "" for rank in range(len(paths) if is_stage_3 else 1)]
    models = [read_file(folder / f"{name}mp_rank_00_model_states.pt") for name in names]
    if models[0]["dp_world_size"] != len(paths):
        raise CheckpointError(
            f"{folder} was saved by {models[0]['dp_world_size']} ranks and has optimizer files of {len(paths)}: it is "
            "incomplete, or two checkpoints were written into it. Use another one"
        )
    if optimizers[0].get("ds_zero_partition_groups") is not None:
        raise CheckpointError(f"{folder} holds expert layers (MoE), which are not supported")
    if is_stage_3:
        buffers, base = _stage_3(models[0], optimizers)
        sharded = {"optimizer_state_dict", "fp32_flat_groups"}
    else:
        buffers, base = _stages_1_and_2(folder, models[0], optimizers)
        sharded = {"base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings"}
        sharded |= {"group_paddings", "param_alignment_paddings"}
    common = {key: value for key, value in optimizers[0].items() if key not in sharded}
    return SavedRun(buffers, base["param_groups"], models, common)


def _optimizer_files(folder: Path) -> list[Path]:
    """The optimizer's files by rank."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*_optim_states.pt")):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match is None or int(match[2]):
            raise CheckpointError(
                f"{path} is of a model-parallel or unknown kind of checkpoint, which is not supported"
            )
        if int(match[1]) in found:
            raise CheckpointError(
                f"{path} and {found[int(match[1])]} are both of rank {match[1]}: two checkpoints in one"
            )
        found[int(match[1])] = path
    if not found:
        raise CheckpointError(
            f"{folder} holds no shards (*_optim_states.pt). Without ZeRO (stage 0) every rank has everything, and "
            "engine.load_checkpoint takes the checkpoint as it is at any number of ranks; else it is not a checkpoint"
        )
    if missing := sorted(set(range(max(found) + 1)) - set(found)):
        raise CheckpointError(f"{folder} has no optimizer file of rank {missing[0]}: it is incomplete. Use another one")
    return [found[rank] for rank in sorted(found)]


def _stages_1_and_2(
    folder: Path, model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[list[SavedBuffer], dict[str, Any]]:
    """A flat buffer a group, cut into equal shards; BF16_Optimizer's files are of this kind, too."""
    if not isinstance(optimizers[0]["base_optimizer_state"], dict):
        raise CheckpointError(
            f"{folder} was saved with zero_optimization.elastic_checkpoint=true, which leaves out the param groups' "
            "options. Load it with the number of ranks that saved it, and save again with elastic_checkpoint=false"
        )
    gaps = optimizers[0].get("param_alignment_paddings")
    buffers = []
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [saved["single_partition_of_fp32_groups"][group].detach() for saved in optimizers]
        # All wrappers but BF16_Optimizer cut the padding at the end off the weights, and off nothing else.
        cut_off = [saved["group_paddings"][group] if "zero_stage" in saved else 0 for saved in optimizers]
        sizes = {shard.numel() + padding for shard, padding in zip(masters, cut_off, strict=True)}
        if len(sizes) != 1:
            raise CheckpointError(f"{folder}: the ranks' shards of param group {group} are of sizes {sorted(sizes)}")
        layers = _layers_end_to_end(shapes, gaps[group] if gaps else [0] * len(shapes), sizes.pop())
        states = [saved["base_optimizer_state"]["state"].get(group, {}) for saved in optimizers]
        buffers.append(SavedBuffer(group, layers, masters, states))
    return buffers, optimizers[0]["base_optimizer_state"]


def _layers_end_to_end(shapes: Mapping[str, Any], gaps: Sequence[int], size: int) -> tuple[SavedLayer, ...]:
    layers, position = [], 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end, pieces = position + math.prod(shape), []
        while position < end:
            rank, start = divmod(position, size)
            pieces.append(Piece(rank, start, min(end - position, size - start)))
            position += pieces[-1].numel
        layers.append(SavedLayer(name, tuple(shape), tuple(pieces)))
        position += gap
    return tuple(layers)


def _stage_3(
    model: Mapping[str, Any], optimizers: Sequence[Mapping[str, Any]]
) -> tuple[list[SavedBuffer], dict[str, Any]]:
    """Every parameter cut into equal slots, a flat buffer a sub-group of slots."""
    base = optimizers[0]["optimizer_state_dict"]
    group_of = [index for index, group in enumerate(base["param_groups"]) for _ in group["params"]]
    buffers = []
    for number, (group, shapes) in enumerate(zip(group_of, model["param_shapes"], strict=True)):
        layers, start = [], 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            slot = math.ceil(numel / len(optimizers))
            runs = [min(slot, numel - rank * slot) for rank in range(len(optimizers))]
            pieces = tuple(Piece(rank, start, run) for rank, run in enumerate(runs) if run > 0)
            layers.append(SavedLayer(name, tuple(shape), pieces))
            start += slot
        masters = [saved["fp32_flat_groups"][number].detach() for saved in optimizers]
        states = [saved["optimizer_state_dict"]["state"].get(number, {}) for saved in optimizers]
        buffers.append(SavedBuffer(group, tuple(layers), masters, states))
    return buffers, base
