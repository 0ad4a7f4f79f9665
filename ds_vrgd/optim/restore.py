"""What a saved state means for an optimizer: its own, its base optimizer's, or one that it cannot continue.

A checkpoint of the base optimizer lacks the running mean of the ratio, and one of a variance-reducing optimizer has
one too many for its base. Both are taken, and said. Everything else that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_vrgd.optim.average import KEY as AVERAGE
from ds_vrgd.optim.average import dtype_of_average
from ds_vrgd.optim.shards import Shard

if TYPE_CHECKING:
    from ds_vrgd.optim.base import VROptimizer

StateDict = dict[str, Any]

#: Options that decide what GSNR does; whether it is on is the optimizer's own choice, never a checkpoint's.
GSNR_OPTIONS = ("gamma", "beta3", "gsnr_eps", "gsnr_dtype")

#: Options of other optimizers that change what their state means, with the only value that can be continued.
UNKNOWN_HERE = {"amsgrad": False, "maximize": False, "dampening": 0}


def fitted(optimizer: VROptimizer, saved: Mapping[str, Any]) -> tuple[StateDict, list[str]]:
    """Bring a saved state dict into the form of ``optimizer``'s own.

    Args:
        optimizer: the one that is to continue.
        saved: of ``state_dict()``; not changed. Its tensors are not copied.

    Returns:
        The state dict to load, and what there is to say about it: nothing if it is the optimizer's own.

    Raises:
        ValueError: a state, an option or a shape that cannot be continued, or a state that is missing.
    """
    name = type(optimizer).__name__
    groups = [dict(group) for group in saved["param_groups"]]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{name}: the checkpoint's param groups have {sizes[0]} tensors, and this optimizer's have {sizes[1]}. "
            "Build it over the same param groups; for another number of ranks or another ZeRO stage, convert the "
            "checkpoint first (ds-vrgd to-universal)"
        )
    state: dict[Any, StateDict] = dict(saved["state"])
    dropped = began = False
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        was_on = group.get("gamma", 1.0) < 1.0
        _fit_options(optimizer, own, group)
        for key, tensor in zip(group["params"], own["params"], strict=True):
            had = {entry: value for entry, value in state.get(key, {}).items() if value is not None}
            if "step" not in had and "step" in group and had:
                had["step"] = group["step"]  # where DeepSpeed's FusedAdam counts
            fit = _fit_state(optimizer, group, tensor, had, averaged_before=was_on)
            dropped = dropped or (AVERAGE in had and AVERAGE not in fit)
            began = began or _lacks_average(optimizer, group, fit)
            if fit:
                state[key] = fit
            else:
                state.pop(key, None)
    notes = []
    if began:
        notes.append(
            f"the checkpoint has no {AVERAGE}: the moments go on, and the running mean of the ratio begins anew"
        )
    if dropped:
        notes.append(f"the checkpoint's {AVERAGE} was dropped, for GSNR is off here; everything else goes on")
    return {**saved, "state": state, "param_groups": groups}, notes


def _averages(optimizer: VROptimizer, group: StateDict) -> bool:
    return bool(optimizer.averages_ratio and group["gamma"] < 1.0)


def _lacks_average(optimizer: VROptimizer, group: StateDict, state: StateDict) -> bool:
    return _averages(optimizer, group) and AVERAGE not in state and float(state.get("step", 0.0)) > 0.0


def _fit_options(optimizer: VROptimizer, own: StateDict, saved: StateDict) -> None:
    """Fill in what ``saved`` lacks, and refuse what it has beyond that."""
    name = type(optimizer).__name__
    for option, neutral in UNKNOWN_HERE.items():
        if saved.get(option, neutral) != neutral:
            raise ValueError(f"{name} cannot continue a checkpoint with {option}={saved[option]!r}: it has no {option}")
    decoupled = optimizer.decoupled_decay
    if decoupled is not None and saved.get("decoupled_weight_decay", decoupled) != decoupled:
        raise ValueError(
            f"{name} cannot continue a checkpoint with decoupled_weight_decay={saved['decoupled_weight_decay']!r}: "
            "its weight decay means something else. AdamW goes on as VRAdamW, Adam as VRAdam"
        )
    for option in optimizer.defaults:
        saved.setdefault(option, own[option])
    if (own["gamma"] < 1.0) != (saved["gamma"] < 1.0):
        saved.update({option: own[option] for option in GSNR_OPTIONS if option in own})


def _fit_state(
    optimizer: VROptimizer, group: StateDict, tensor: Tensor, had: StateDict, *, averaged_before: bool
) -> StateDict:
    """The state of one tensor, with nothing missing and nothing too many."""
    name, expected = type(optimizer).__name__, optimizer.state_keys(group)
    fit = {key: value for key, value in had.items() if key != AVERAGE or _averages(optimizer, group)}
    counted = ("step",) if optimizer.counts_steps else ()
    known = {*expected, *counted, *((AVERAGE,) if optimizer.averages_ratio else ())}
    if unknown := sorted(set(had) - known):
        raise ValueError(
            f"{name} has no state {', '.join(unknown)}, which the checkpoint brings: it was saved by another kind of "
            "optimizer. Load the weights alone (load_optimizer_states=False), or use the optimizer that saved it"
        )
    if not fit:
        return fit
    missing = [key for key in (*expected, *counted) if key not in fit]
    if averaged_before and _lacks_average(optimizer, group, fit):
        missing.append(AVERAGE)
    if missing:
        raise ValueError(
            f"{name} finds no {', '.join(missing)} in the checkpoint, which has {', '.join(sorted(had))}: its state is "
            "incomplete. Load the weights alone (load_optimizer_states=False), or another checkpoint"
        )
    for key, value in fit.items():
        if key != "step" and (not isinstance(value, Tensor) or value.shape != tensor.shape):
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"{name}: {key} in the checkpoint is {shape}, and belongs to a tensor of {tuple(tensor.shape)}: it "
                "was saved with other shards. Use the configuration that saved it, or convert the checkpoint first "
                "(ds-vrgd to-universal)"
            )
    if "step" in fit:  # others count in an int, or on the device; here it is read in every step
        fit["step"] = torch.tensor(float(fit["step"]))
    return fit


def cast_averages(optimizer: VROptimizer) -> None:
    """Undo what torch does to the running means of the ratio when it loads them: it casts to the weights' dtype."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state.get(tensor, {})
            if AVERAGE in state:
                dtype = dtype_of_average(Shard(group, tensor, tensor, state))
                state[AVERAGE] = state[AVERAGE].to(dtype)
