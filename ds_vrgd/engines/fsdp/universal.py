"""Continue under FSDP2 what DeepSpeed ZeRO has trained: from a checkpoint that ``ds-vrgd to-universal`` converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from ds_vrgd.moments import is_dtensor, local
from ds_vrgd.optim import VROptimizer


def load_universal(folder: str | Path, model: nn.Module, optimizer: VROptimizer) -> None:
    """Load weights, every state, the options of the param groups, frozen weights and buffers.

    Every rank reads the whole files, one parameter at a time, and keeps its part. DeepSpeed must be installed, for its
    classes are in the checkpoint; no engine is built.

    Args:
        folder: ``output/<tag>`` of ``ds-vrgd to-universal``.
        model: sharded by ``fully_shard``.
        optimizer: over ``model``'s parameters, in the same param groups as the one that was saved.

    Raises:
        CheckpointError: a parameter is missing, is too many, or has another shape or group; nothing was changed then.
        ValueError: the optimizer cannot continue this state (``VROptimizer.load_state_dict``).
    """
    from ds_vrgd.engines.deepspeed.checkpoints.safe_load import CheckpointError, read_plain
    from ds_vrgd.engines.deepspeed.checkpoints.universal import REST, read_layers

    folder, groups = Path(folder), optimizer.param_groups
    names = {param: name for name, param in model.named_parameters()}
    own = {names[param]: (list(param.shape), index) for index, group in enumerate(groups) for param in group["params"]}
    layers = read_layers(folder, own, len(groups))
    common, rest = read_plain(folder / "zero" / "optimizer_state.pt"), read_plain(folder / REST)
    others = {name: own for name, own in model.state_dict(keep_vars=True).items() if name not in layers}
    for name in others.keys() - rest.keys():
        if names.get(others[name]) not in layers:  # else it is tied to one that was saved under another name
            raise CheckpointError(f"{folder} has no {name}, which this model has frozen or as a buffer")
    weights: list[tuple[Tensor, Tensor]] = []
    state: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(param for group in groups for param in group["params"]):
        layer, path = layers[names[param]], folder / "zero" / names[param]
        parts = {key: _part(read_plain(path / f"{key}.pt")["param"], param) for key in ("fp32", *layer["states"])}
        weights.append((param, parts.pop("fp32")))
        state[index] = parts | {key: read_plain(path / f"{key}.pt") for key in layer["scalars"]}
    pairs = zip(common["param_groups"], optimizer.state_dict()["param_groups"], strict=True)
    options = [{**was, "params": now["params"]} for was, now in pairs]
    optimizer.load_state_dict({"state": state, "param_groups": options})
    with torch.no_grad():
        for name in others.keys() & rest.keys():
            weights.append((others[name], _part(rest[name], others[name])))
        for tensor, value in weights:
            local(tensor).copy_(local(value))


def _part(whole: Tensor, like: Any) -> Tensor:
    """Return a whole tensor as a DTensor like ``like``, of which this rank keeps its part; no rank sends anything."""
    if not is_dtensor(like):
        return whole.to(like.device)
    return distribute_tensor(whole.to(local(like).device), like.device_mesh, like.placements, src_data_rank=None)
