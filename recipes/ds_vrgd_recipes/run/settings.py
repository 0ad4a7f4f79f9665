"""The mathematics of a DeepSpeed JSON: checked before data are prepared, and compared with those of an earlier run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_vrgd.engines.deepspeed.register import NAMES
from ds_vrgd_recipes.run.errors import InputError

#: The group options of a training with a single param group.
ONE_GROUP: tuple[dict[str, Any], ...] = ({},)

# Sections that may be switched off, and other keys that make another run of a resumed one.
_SECTIONS = ("bf16", "fp16", "torch_autocast")
_KEYS = ("communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor")
_ZERO_KEYS = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
# The run sets the learning rate of every update. The other three change no number in a run.
_FREE = {"params", "lr", "nonfinite", "ranks_per_node", "watch"}


def check_optimizer(config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Check the optimizer's arguments in a DeepSpeed JSON as its class does, without an engine.

    Args:
        groups: the options of the run's param groups.

    Raises:
        InputError: an argument that the class does not take, or a value out of its range.
    """
    _arguments(config["optimizer"], groups)


def mathematics(config: Mapping[str, Any], ranks: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes from it must agree on in a DeepSpeed JSON.

    See ``checkpoint.check``. The optimizer's arguments are listed by param group; what the JSON leaves out has its
    default.

    Args:
        config: filled, so that nothing in it is "auto".
        groups: the options of the run's param groups.
    """
    zero = config.get("zero_optimization", {})
    described = {
        "ranks": ranks,
        "zero_stage": zero.get("stage", 0),
        "optimizer": config["optimizer"]["type"],
        "optimizer_params": _arguments(config["optimizer"], groups),
        "gradient_clipping": float(config.get("gradient_clipping") or 0.0),
        **{name: section if (section := config.get(name, {})).get("enabled") else "off" for name in _SECTIONS},
        **{name: config.get(name) for name in _KEYS},
        **{name: zero.get(name, False) for name in _ZERO_KEYS},
    }
    as_saved: dict[str, Any] = _as_saved(described)
    return as_saved


def with_defaults(optimizer: str, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return saved ``optimizer_params`` with the defaults of arguments that an older version did not know yet."""
    defaults = _arguments({"type": optimizer, "params": {"lr": 0.0}}, ONE_GROUP)[0] if optimizer in NAMES else {}
    filled: list[dict[str, Any]] = _as_saved([{**defaults, **group} for group in saved])
    return filled


def arguments_of_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the arguments in an optimizer's ``param_groups``, as a description has them."""
    found: list[dict[str, Any]] = _as_saved(
        [{name: value for name, value in group.items() if name not in _FREE} for group in groups]
    )
    return found


def difference(key: str, was: Any, wanted: Any) -> str:
    """Return the values of a setting that differ, down to the single key, for an error."""
    if isinstance(was, list) and isinstance(wanted, list) and len(was) == len(wanted):
        was, wanted = dict(enumerate(was, start=1)), dict(enumerate(wanted, start=1))
    if isinstance(was, dict) and isinstance(wanted, dict):
        return ", ".join(
            difference(f"{key}.{name}", was.get(name, "not given"), wanted.get(name, "not given"))
            for name in {**was, **wanted}
            if was.get(name, "not given") != wanted.get(name, "not given")
        )
    return f"{key}={was}, not {wanted}"


def _as_saved(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _arguments(optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    given = optimizer.get("params") or {}
    if not isinstance(given, dict):
        raise InputError(f"optimizer.params={json.dumps(given)} in the DeepSpeed JSON is not an object; give {{...}}")
    if optimizer["type"] not in NAMES:  # one of DeepSpeed's, which checks them when the engine is built
        found = [{**given, **group} for group in groups]
    else:
        params = [{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups]
        try:
            built = NAMES[optimizer["type"]](params, **given)
        except (TypeError, ValueError) as error:
            raise InputError(f"optimizer.params in the DeepSpeed JSON: {error}") from error
        found = [{**group, "reduction": built.reduction} for group in built.param_groups]
    return arguments_of_groups(found)
