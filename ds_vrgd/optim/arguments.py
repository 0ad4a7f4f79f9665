"""Checks of constructor arguments: every error names the argument, its value and the range."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise ValueError(f"{name}={value!r} is not a finite number")
    return float(value)


def at_least(name: str, value: Any, low: float) -> None:
    """Require ``value >= low``."""
    if _number(name, value) < low:
        raise ValueError(f"{name}={value!r} is out of range: must be >= {low:g}")


def above(name: str, value: Any, low: float) -> None:
    """Require ``value > low``."""
    if _number(name, value) <= low:
        raise ValueError(f"{name}={value!r} is out of range: must be > {low:g}")


def fraction(name: str, value: Any) -> None:
    """Require ``0 <= value < 1``, as for the decay rate of a moving average."""
    if not 0.0 <= _number(name, value) < 1.0:
        raise ValueError(f"{name}={value!r} is out of range: must be in [0, 1)")


def clamp_floor(name: str, value: Any) -> None:
    """Require ``0 < value <= 1``."""
    if not 0.0 < _number(name, value) <= 1.0:
        raise ValueError(f"{name}={value!r} is out of range: must be in (0, 1]; 1 turns GSNR off")


def flag(name: str, value: Any) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")


def pair_of_fractions(name: str, value: Any) -> None:
    """Require two numbers in ``[0, 1)``."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be two numbers in [0, 1)")
    for index, rate in enumerate(value):
        fraction(f"{name}[{index}]", rate)


def interval(name: str, value: Any) -> None:
    """Require None, or two numbers with ``0 <= lo <= hi``."""
    if value is None:
        return
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{name}={value!r} must be None or a pair (lo, hi)")
    low, high = (_number(f"{name}[{index}]", bound) for index, bound in enumerate(value))
    if not 0.0 <= low <= high:
        raise ValueError(f"{name}={value!r} is out of range: must have 0 <= lo <= hi")


def reduction(name: str, value: Any) -> None:
    """Require one of the words."""
    if value not in ("auto", "fused", "observe"):
        raise ValueError(f'{name}={value!r} must be "auto", "fused" or "observe"')


def nonfinite(name: str, value: Any) -> None:
    """Require one of the words."""
    if value not in ("skip", "error"):
        raise ValueError(f'{name}={value!r} must be "skip" or "error"')


def ranks_per_node(name: str, value: Any) -> None:
    """Require None or a positive integer."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}={value!r} is out of range: must be None or an integer >= 1")


def gsnr_dtype(name: str, value: Any) -> None:
    """Require one of the dtypes that the running mean of the ratio may have."""
    if str(value).removeprefix("torch.") not in ("float32", "bfloat16"):
        raise ValueError(f'{name}={value!r} must be "float32" or "bfloat16"')


#: What checks an argument's value, called with its name and the value.
CHECKS: dict[str, Callable[[str, Any], None]] = {
    "lr": partial(at_least, low=0.0),
    "momentum": fraction,
    "nesterov": flag,
    "betas": pair_of_fractions,
    "beta3": fraction,
    "eps": partial(at_least, low=0.0),
    "weight_decay": partial(at_least, low=0.0),
    "gamma": clamp_floor,
    "gsnr_eps": partial(above, low=0.0),
    "trust_coefficient": partial(above, low=0.0),
    "trust_clip": interval,
    "bias_correction": flag,
    "adapt": flag,
    "prenormalize": flag,
    "gsnr_dtype": gsnr_dtype,
    "reduction": reduction,
    "ranks_per_node": ranks_per_node,
    "nonfinite": nonfinite,
}

#: The arguments of variance reduction.
GSNR = ("beta3", "gamma", "gsnr_eps", "gsnr_dtype", "reduction", "ranks_per_node", "nonfinite")

#: The arguments of the whole optimizer, which no param group has, with their defaults.
OF_THE_WHOLE: dict[str, Any] = {"reduction": "auto", "ranks_per_node": None, "nonfinite": "skip"}


def check(optimizer: str, known: Collection[str], given: Mapping[str, Any], hidden: Collection[str] = ()) -> None:
    """Check ``given`` against the arguments that ``optimizer`` knows; those in ``hidden`` are offered to nobody.

    Raises:
        ValueError: naming an unknown argument and the known ones, or an argument out of its range.
    """
    offered = sorted(name for name in known if name not in hidden)
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{optimizer} has no argument {name}={value!r}; it takes {', '.join(offered)}")
        if name in CHECKS:
            CHECKS[name](name, value)


def refuse_of_the_whole(optimizer: str, group: Mapping[str, Any]) -> None:
    """Refuse, in a param group, the arguments that cannot differ between groups.

    Raises:
        ValueError: naming the argument and where it belongs.
    """
    for name in OF_THE_WHOLE:
        if name in group:
            raise ValueError(
                f"{name}={group[name]!r} in a param group: it holds for all groups. Give it to {optimizer}(...) itself"
            )


def refuse_gsnr(optimizer: str, given: Mapping[str, Any]) -> None:
    """Refuse the arguments of GSNR for an optimizer that has none.

    Raises:
        ValueError: naming the argument and the optimizer to use instead.
    """
    for name in GSNR:
        if name in given:
            raise ValueError(
                f"{optimizer} has no argument {name}={given[name]!r}, for it does no variance reduction; "
                f"VR{optimizer} does"
            )
