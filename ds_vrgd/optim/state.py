"""The loading of a saved state: an optimizer's own, its base optimizer's, or one that it cannot continue.

A checkpoint of the base optimizer lacks the running mean of the ratio; one of a variance-reducing optimizer has a
running mean that its base does not want. Both load, with a warning. Everything else that does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.moments import local
from ds_vrgd.optim.observer import AVERAGE, NOT_LOADED, RATIOS, Shard
from ds_vrgd.optim.passes import Rule

StateDict = dict[str, Any]

#: Options that decide what GSNR does; whether it is on is the optimizer's own choice, never a checkpoint's.
GSNR_OPTIONS = ("gamma", "beta3", "gsnr_eps", "gsnr_dtype")

#: Options of other optimizers that change what their state means, with the only value that can be continued.
UNKNOWN_HERE = {"amsgrad": False, "maximize": False, "dampening": 0}


def fitted(rule: Rule, saved: Mapping[str, Any]) -> tuple[StateDict, list[str]]:
    """Bring a saved state dict into the form of an optimizer's own.

    Args:
        rule: the optimizer that is to continue.
        saved: what ``state_dict()`` gave; it is not changed, and its tensors are not copied.

    Returns:
        The state dict to load, and remarks for a warning: none if it is the optimizer's own.

    Raises:
        ValueError: a state, an option or a shape that cannot be continued, or a state that is missing.
    """
    name = type(rule).__name__
    groups = [dict(group) for group in saved["param_groups"]]
    sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in rule.param_groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{name}: the checkpoint's param groups have {sizes[0]} tensors, and this optimizer's have {sizes[1]}."
            " Build it over the same param groups; for another number of ranks or another ZeRO stage, convert the "
            "checkpoint first (ds-vrgd to-universal)"
        )
    state: dict[Any, StateDict] = dict(saved["state"])
    dropped = began = False
    for own, group in zip(rule.param_groups, groups, strict=True):
        was_on = group.get("gamma", 1.0) < 1.0
        _fit_options(rule, own, group)
        for key, tensor in zip(group["params"], own["params"], strict=True):
            had = {entry: value for entry, value in state.get(key, {}).items() if value is not None}
            if "step" not in had and "step" in group and had:
                had["step"] = group["step"]  # where DeepSpeed's FusedAdam counts
            fit = _fit_state(rule, group, tensor, had, averaged_before=was_on)
            begins = lacks_average(rule, group, fit)
            dropped = dropped or (AVERAGE in had and AVERAGE not in fit and not begins)
            began = began or begins
            if fit:
                state[key] = fit
            else:
                state.pop(key, None)
    remarks = []
    if began:
        remarks.append(
            f"the checkpoint has no {AVERAGE}: the moments continue, and the running mean of the ratio begins anew"
        )
    if dropped:
        remarks.append(f"the checkpoint's {AVERAGE} was dropped, for GSNR is off here; everything else continues")
    return {**saved, "state": state, "param_groups": groups}, remarks


def lacks_average(rule: Rule, group: StateDict, state: StateDict) -> bool:
    """Return whether a tensor's state has steps, and no running mean of the ratio, which its group wants."""
    averages = rule.averages_ratio and group["gamma"] < 1.0
    return averages and AVERAGE not in state and float(state.get("step", 0.0)) > 0.0


def _fit_options(rule: Rule, own: StateDict, saved: StateDict) -> None:
    """Add the options that ``saved`` lacks, and refuse those of other optimizers."""
    name = type(rule).__name__
    for option, neutral in UNKNOWN_HERE.items():
        if saved.get(option, neutral) != neutral:
            raise ValueError(f"{name} cannot continue a checkpoint with {option}={saved[option]!r}: it has no {option}")
    decoupled = rule.decoupled_decay
    if decoupled is not None and saved.get("decoupled_weight_decay", decoupled) != decoupled:
        raise ValueError(
            f"{name} cannot continue a checkpoint with decoupled_weight_decay="
            f"{saved['decoupled_weight_decay']!r}: its weight decay means something else. Use VRAdamW for a checkpoint "
            "of AdamW, and VRAdam for one of Adam"
        )
    for option in rule.defaults:
        saved.setdefault(option, own[option])
    if (own["gamma"] < 1.0) != (saved["gamma"] < 1.0):
        saved.update({option: own[option] for option in GSNR_OPTIONS if option in own})


def _fit_state(rule: Rule, group: StateDict, tensor: Tensor, had: StateDict, *, averaged_before: bool) -> StateDict:
    """Return the state of one tensor with every entry that the optimizer needs, and no other."""
    name, averages = type(rule).__name__, rule.averages_ratio and group["gamma"] < 1.0
    average = local(had[AVERAGE]) if averages and float(had.get("step", 0.0)) > 0.0 and AVERAGE in had else None
    if average is not None and average.numel() and had.get(RATIOS) != 0 and not bool(average.any()):
        # A mean of ratios that are at least gamma is not 0: torch.distributed.checkpoint has made it, and loaded none.
        had, averaged_before = {key: had[key] for key in had if key not in (AVERAGE, RATIOS)}, False
    fit = {key: value for key, value in had.items() if key not in (AVERAGE, RATIOS) or averages}
    expected = [*rule.state_keys(group), *(["step"] if rule.counts_steps else [])]
    known = {*expected, *([AVERAGE, RATIOS] if rule.averages_ratio else [])}
    if unknown := sorted(set(had) - known):
        raise ValueError(
            f"{name} has no state {', '.join(unknown)}, which the checkpoint brings: it was saved by another kind "
            "of optimizer. Load the weights alone (load_optimizer_states=False), or use the optimizer that saved it"
        )
    if not fit:
        return fit
    missing = [key for key in expected if key not in fit]
    if averaged_before and RATIOS not in fit and lacks_average(rule, group, fit):
        missing.append(AVERAGE)
    if missing:
        raise ValueError(
            f"{name} finds no {', '.join(missing)} in the checkpoint, which has {', '.join(sorted(had))}: its "
            "state is incomplete. Load the weights alone (load_optimizer_states=False), or another checkpoint"
        )
    for key, value in fit.items():
        if key not in ("step", RATIOS) and (not isinstance(value, Tensor) or value.shape != tensor.shape):
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"{name}: {key} in the checkpoint is {shape}, and belongs to a tensor of {tuple(tensor.shape)}: "
                "it was saved with other shards. Use the configuration that saved it, or convert the checkpoint first "
                "(ds-vrgd to-universal)"
            )
    if "step" in fit:  # others count in an int, or on the device; here it is read in every step
        fit["step"] = torch.tensor(float(fit["step"]))
    if RATIOS in fit:  # torch would cast a tensor to the weights' dtype
        fit[RATIOS] = int(fit[RATIOS])
        if fit[RATIOS] in (NOT_LOADED, int(fit["step"])):  # every step has brought a ratio
            del fit[RATIOS]
    return fit


def cast_averages(groups: Sequence[StateDict], state: Mapping[Tensor, StateDict]) -> None:
    """Undo torch's cast of the loaded running means of the ratio to the weights' dtype."""
    for group in groups:
        for tensor in group["params"]:
            of_tensor = state.get(tensor, {})
            if AVERAGE in of_tensor:
                of_tensor[AVERAGE] = of_tensor[AVERAGE].to(Shard(group, tensor, tensor, of_tensor).average_dtype)
