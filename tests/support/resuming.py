"""Train an engine for some steps, and record everything that its next step depends on."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.doctor.weights import whole_layers, whole_weights
from tests.support.model import batches
from tests.support.trajectory import Case

#: A schedule and a loss scale that both move while the cases run.
MOVING: dict[str, Any] = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 10}},
}


def moving_config(case: Case, world: int, **more: Any) -> dict[str, Any]:
    """Return the case's JSON with a learning rate, and in fp16 a loss scale, that changes from step to step."""
    config = copy.deepcopy(case.config(world)) | copy.deepcopy(MOVING) | more
    if case.dtype == "fp16":
        config["fp16"] |= {"loss_scale_window": 2, "hysteresis": 1}
    return config


def train(engine: Any, case: Case, rank: int, world: int, steps: range) -> None:
    """Take steps whose micro-batches depend on their numbers alone."""
    for step in steps:
        micro_batches = [tokens.to(engine.device) for tokens in batches(step, case.accumulation * world)]
        for index in range(case.accumulation):
            engine.backward(engine(micro_batches[index * world + rank]))
            engine.step()


def options(engine: Any) -> list[dict[str, Any]]:
    """Return the options of every param group; torch adds "differentiable" when it loads."""
    groups = engine.basic_optimizer.param_groups
    return [{n: value for n, value in group.items() if n not in ("params", "differentiable")} for group in groups]


def everything(engine: Any, *, schedule: bool = True) -> dict[str, Any]:
    """Return this rank's shards and state, and what the ranks share; a collective at stage 3."""
    optimizer = engine.basic_optimizer
    with whole_weights(engine) as weights:
        model = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
    return {
        "model": model,
        **shards(optimizer, optimizer.observer.tensors),
        "options": options(engine),
        "loss_scale": float(getattr(engine.optimizer, "loss_scale", 1.0)),
        "steps": (engine.global_steps, engine.skipped_steps),
        "schedule": engine.lr_scheduler.state_dict() if schedule else None,
    }


def shards(optimizer: Any, tensors: Iterable[Tensor]) -> dict[str, list[Any]]:
    """Return the masters and the state of an optimizer's tensors, without padding."""
    masters, state = [], []
    for tensor in tensors:
        masters.append(real(optimizer, tensor, tensor.detach()))
        state.append({key: real(optimizer, tensor, value) for key, value in optimizer.state.get(tensor, {}).items()})
    return {"masters": masters, "state": state}


def real(optimizer: Any, tensor: Tensor, values: Tensor) -> Tensor | list[Tensor]:
    """Return the elements that belong to a parameter; the padding of ZeRO-3 is uninitialised memory."""
    if values.dim() == 0:
        return values.cpu().clone()
    flat = values.flatten()
    return [
        flat[segment.start : segment.start + segment.numel].cpu().clone()
        for segment in optimizer.observer.layout(tensor).segments
    ]


def whole_state(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Return ``fp32`` and every per-element state by layer, flat, gathered from all ranks; a collective."""
    optimizer = engine.basic_optimizer
    tensors = optimizer.observer.tensors
    found = {"fp32": whole_layers(optimizer, {tensor: tensor.detach() for tensor in tensors})}
    keys = {key for tensor in tensors for key in optimizer.state.get(tensor, {})}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, keys)
    for key in sorted(set().union(*gathered)):
        values = {tensor: optimizer.state[tensor][key] for tensor in tensors if key in optimizer.state[tensor]}
        if key == "step":
            found[key] = {str(index): value.clone() for index, value in enumerate(values.values())}
        else:
            found[key] = whole_layers(optimizer, values)
    return found


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two structures of tensors differ, bitwise."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        found = [] if one.keys() == other.keys() else [f"{path}: {sorted(one)} and {sorted(other)}"]
        return found + [
            where for key in one if key in other for where in differences(one[key], other[key], f"{path}.{key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{path}: {len(one)} and {len(other)} entries"]
        return found + [
            where
            for index, pair in enumerate(zip(one, other, strict=False))
            for where in differences(*pair, f"{path}[{index}]")
        ]
    return [] if one == other else [f"{path}: {one} and {other}"]
