"""The constructor arguments of the optimizers, each once: default, range, meaning, and the optimizers that have it.

Signatures are written out in the classes; ``tests/optim/test_options.py`` compares them, ``help()`` and
docs/OPTIMIZERS.md with this table.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar


class Range(NamedTuple):
    """The values that an argument may have."""

    text: str  # the range in words, as an error and the documentation show it
    check: Callable[[str, Any], None]  # given name and value, raises a ValueError with both and the range


def _of_text(value: Any) -> str:
    """Return what to do about text in the place of a number."""
    if value == "auto":
        return ', and only the Trainer and Accelerate put one in the place of "auto". Give a number'
    if isinstance(value, str):
        return ". Give it without quotes; YAML reads 1e-3 as text, and 1.0e-3 as a number"
    return ""


def _range(text: str, holds: Callable[[Any], bool], *, said: str = "must be", number: bool = False) -> Range:
    def check(name: str, value: Any) -> None:
        if number and (isinstance(value, bool) or not hasattr(value, "__float__") or not math.isfinite(float(value))):
            raise ValueError(f"{name}={value!r} is not a finite number{_of_text(value)}")
        if not holds(float(value) if number else value):
            raise ValueError(f"{name}={value!r} {said} {text}")

    return Range(text, check)


def _numbers(text: str, holds: Callable[[float], bool]) -> Range:
    return _range(text, holds, said="is out of range: must be", number=True)


def _pairs(text: str, of_each: Range, *, ordered: str = "", none: bool = False) -> Range:
    def check(name: str, value: Any) -> None:
        if none and value is None:
            return
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise ValueError(f"{name}={value!r} must be {text}")
        for index, entry in enumerate(value):
            of_each.check(f"{name}[{index}]", entry)
        if ordered and not 0.0 <= value[0] <= value[1]:
            raise ValueError(f"{name}={value!r} is out of range: must have {ordered}")

    return Range(text, check)


def _choice(*names: str) -> Range:
    *first, last = (f'"{name}"' for name in names)
    return _range(f"{', '.join(first)} or {last}", lambda value: str(value).removeprefix("torch.") in names)


ANY = _numbers("finite", lambda value: True)
AT_LEAST_0 = _numbers(">= 0", lambda value: value >= 0.0)
ABOVE_0 = _numbers("> 0", lambda value: value > 0.0)
DECAY = _numbers("in [0, 1)", lambda value: 0.0 <= value < 1.0)
FLOOR = _numbers("in (0, 1]", lambda value: 0.0 < value <= 1.0)
FLAG = _range("true or false", lambda value: isinstance(value, bool))
DECAYS = _pairs("two numbers in [0, 1)", DECAY)
INTERVAL = _pairs("None or a pair (lo, hi)", ANY, ordered="0 <= lo <= hi", none=True)
COUNT = _range(
    "None or an integer >= 1", lambda n: n is None or (type(n) is int and n >= 1), said="is out of range: must be"
)
WATCH = _range('None, "log", "error" or callable', lambda value: value in (None, "log", "error") or callable(value))


class Option(NamedTuple):
    """One constructor argument."""

    of: Mapping[str, Any]  # the optimizers that have it, each with its default
    range: Range  # its values
    meaning: str  # its line in ``help()``
    whole: bool = False  # it holds for the whole optimizer, and no param group may have it


#: The optimizers that do no variance reduction, with their twins that do.
TWINS = {"LARS": "VRLARS", "LAMB": "VRLAMB"}

_REDUCING = ("VRSGD", "VRMomentum", "VRAdam", "VRAdamW", "VRLARS", "VRLAMB")
_EVERY, _SGD, _ADAM = (*_REDUCING, "LARS", "LAMB"), ("VRSGD", "VRMomentum"), ("VRAdam", "VRAdamW")
_LARS, _LAMB, _AVERAGING = ("VRLARS", "LARS"), ("VRLAMB", "LAMB"), (*_ADAM, "VRLAMB")


def _in(names: Iterable[str], default: Any, **others: Any) -> dict[str, Any]:
    return dict.fromkeys(names, default) | others


OPTIONS: dict[str, Option] = {
    "lr": Option(_in(_EVERY, 1e-3), AT_LEAST_0, "learning rate."),
    "momentum": Option(_in((*_SGD, *_LARS), 0.9, VRSGD=0.0), DECAY, "decay of the momentum buffer."),
    "nesterov": Option(
        _in((*_SGD, *_LARS), False), FLAG,
        "look ahead as ``torch.optim.SGD`` does; VRSGD and VRMomentum then need a momentum.",
    ),
    "betas": Option(_in((*_ADAM, *_LAMB), (0.9, 0.999)), DECAYS, "decay of the first and of the second moment."),
    "beta3": Option(_in(_AVERAGING, 0.9), DECAY, "decay of the running mean of the ratio r."),
    "eps": Option(
        _in((*_ADAM, *_LARS), 1e-8, VRLAMB=1e-6, LAMB=1e-6), AT_LEAST_0,
        "added to the root of the second moment, in LARS to the denominator of the trust ratio, in the gradient's "
        "units. Where Adam's or LAMB's eps is 0 in the weights' dtype (as 1e-8 is in fp16), an element that never had "
        "a gradient becomes NaN, as in ``torch.optim.Adam``.",
    ),
    "weight_decay": Option(
        _in(_EVERY, 0.0, VRAdamW=0.01), AT_LEAST_0,
        "coefficient of weight decay. It adds ``weight_decay * w`` to the gradient; in VRAdamW it is decoupled, ``w *= "
        "1 - lr * weight_decay``; in LAMB it adds to the update, inside the trust ratio.",
    ),
    "trust_coefficient": Option(_in(_LARS, 1e-3), ABOVE_0, "the factor eta of LARS' trust ratio."),
    "gamma": Option(
        _in(_REDUCING, 0.1), FLOOR,
        "floor of the ratio r (equation 9). 1 turns GSNR off, and leaves the base optimizer, bitwise.",
    ),
    "gsnr_eps": Option(_in(_REDUCING, 1e-6), ABOVE_0, "floor of the variance, relative to the squared mean gradient."),
    "gsnr_dtype": Option(
        _in(_AVERAGING, "float32"), _choice("float32", "bfloat16"),
        'dtype of the running mean of the ratio, or its name. "float32" is the weights\' own dtype. "bfloat16" halves '
        "its memory, and is rounded stochastically, since otherwise the mean would stand still.",
    ),
    "bias_correction": Option(_in(_LAMB, True), FLAG, "debias the two moments."),
    "trust_clip": Option(_in((*_LARS, *_LAMB), None), INTERVAL, "bounds of the trust ratio, 0 <= lo <= hi."),
    "adapt": Option(
        _in((*_LARS, *_LAMB), True), FLAG,
        "whether layers have a trust ratio. False sets it to 1; meant for the param group of biases and norms.",
    ),
    "prenormalize": Option(
        _in(_LAMB, False), FLAG, "divide the gradient by its 2-norm over the whole model first, as NVLAMB does."
    ),
    "reduction": Option(
        _in(_EVERY, "auto"), _choice("auto", "fused", "observe"),
        'what an engine does with its own reduction of the gradients. "fused" replaces it by the exchange of the '
        'chunks\' gradients, "observe" runs the exchange in addition to it (not where gamma is 1: there the engine\'s '
        'mean is taken), "auto" replaces it wherever that is exact; where gamma is 1, in LARS and LAMB alone.',
        whole=True,
    ),
    "ranks_per_node": Option(
        _in(_EVERY, None), COUNT,
        "number of consecutive ranks that exchange gradients; between such groups only moments travel. None takes the "
        "launcher's number of ranks on a node.",
        whole=True,
    ),
    "nonfinite": Option(
        _in(_REDUCING, "skip"), _choice("skip", "error"),
        'what to do when a chunk of the window holds a NaN or an infinity. "skip" leaves the step out, "error" raises '
        "FloatingPointError before any weight is updated. Both name the layer, the rank and the micro-batch.",
        whole=True,
    ),
    "watch": Option(
        _in(_EVERY, None), WATCH,
        "what to do when a rank's gradient is not like the others' (``ds_vrgd.RankWatch``): log it, raise RankError "
        "after the step, or call a function with a ``RankEvent`` on every rank. The exchange then takes the place of "
        "the engine's reduction also where gamma is 1; where it cannot, this is an error. None compares nothing.",
        whole=True,
    ),
}  # fmt: skip

#: The arguments of the whole optimizer, with their defaults.
WHOLE: dict[str, Any] = {name: option.of["VRSGD"] for name, option in OPTIONS.items() if option.whole}

#: Keys that others put into a param group before an optimizer is built: torch, its optimizers and schedulers,
#: DeepSpeed (mixture of experts, Muon, FusedAdam), Megatron-Core, timm, GaLore. A schedule also puts in keys that are
#: made of an argument's name, such as ``initial_lr``.
OF_OTHERS = {
    "params", "param_names", "name", "names", "group_name", "layer", "step", "foreach", "maximize", "capturable",
    "differentiable", "fused", "amsgrad", "dampening", "decoupled_weight_decay", "moe", "use_muon", "max_grad_norm",
    "max_coeff", "min_coeff", "is_expert_parallel", "is_decoupled_lr", "default_config", "alpha", "always_adapt",
    "scale", "rank", "update_proj_gap", "proj_type",
}  # fmt: skip
#: Those of them by which torch's optimizers choose how they compute what they compute anyway.
OF_TORCH = {"foreach", "fused", "capturable", "differentiable"}
_NO_TERM = "the formulas have no such term. Leave it out"
_BOUNDS = "the bounds of the trust ratio are trust_clip=(lo, hi), an argument of VRLAMB, LAMB, VRLARS and LARS"
_BETAS = "give betas=(beta1, beta2)"
#: Arguments of other optimizers, and what to do about them here.
ELSEWHERE = {
    "wd": "use weight_decay",
    "beta1": _BETAS,
    "beta2": _BETAS,
    "amsgrad": _NO_TERM,
    "maximize": _NO_TERM,
    "dampening": _NO_TERM,
    "min_coeff": _BOUNDS,
    "max_coeff": _BOUNDS,
    "max_grad_norm": "it does not clip. Set gradient_clipping in the DeepSpeed JSON, max_grad_norm in the "
    "TrainingArguments, or clip before step()",
    "adam_w_mode": "the class decides. Use VRAdamW for true, VRAdam for false",
    "torch_adam": "it chooses among DeepSpeed's implementations, and there is one here. Leave it out",
}
_ARGUMENT = "|".join([*OPTIONS, "wd"])
_DERIVED = re.compile(f"(initial|base|max|min|swa|pre|start|end)_({_ARGUMENT})|(pre_)?({_ARGUMENT})_(mult|scale)")


class UnknownArgument(TypeError, ValueError):
    """An argument that an optimizer does not have: a TypeError as in any call, a ValueError as in any configuration."""


def nearest(name: str, known: Iterable[str], alike: float = 0.8) -> str | None:
    """Return the one of ``known`` that ``name`` is most likely a misspelling of; None if it is like none of them.

    Case, hyphens and underscores do not count. ``alike`` is the share of the characters of both that must agree.
    """

    def letters(name: str) -> str:
        return "".join(filter(str.isalnum, name.casefold()))

    plain = {letters(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(letters(name), plain, n=1, cutoff=alike)
    return plain[found[0]] if found else None


def require_known(optimizer: type, given: Mapping[str, Any]) -> None:
    """Refuse keywords that an optimizer's constructor does not have.

    Raises:
        UnknownArgument: naming the argument, why it is missing or what was probably meant, and the known ones.
    """
    known = _accepted(optimizer)
    for name, value in given.items():
        if name not in (*known, "params"):
            advice = _advice(optimizer, name, known)
            raise UnknownArgument(f"{optimizer.__name__} has no argument {name}={value!r}{advice}")


def _accepted(optimizer: type) -> list[str]:
    """Return the arguments that a class takes after ``params``, with those that it passes on to its base class."""
    names: set[str] = set()
    for cls in optimizer.__mro__:
        if "__init__" in vars(cls):
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            names |= {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
                break
    return sorted(names - {"self", "params"})


def _advice(optimizer: type, name: str, known: Iterable[str]) -> str:
    option = OPTIONS.get(name)
    twin = next((TWINS[cls.__name__] for cls in optimizer.__mro__ if cls.__name__ in TWINS), None)
    if option is not None and twin in option.of:
        return f": it {'observes no chunks' if option.whole else 'does no variance reduction'}. Use {twin}"
    if name in OF_TORCH:
        return ": it chooses among torch's implementations, and there is one here. Leave it out"
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    meant = nearest(name, known)
    others = f", which {', '.join(option.of)} have" if option is not None else ""
    return (others or (f" (did you mean '{meant}'?)" if meant else "")) + f"; it takes {', '.join(known)}"


def passed(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor from its ``locals()``, to pass all of them on to the base class."""
    return {name: value for name, value in frame.items() if name not in ("self", "__class__")}


def check(given: Mapping[str, Any]) -> None:
    """Check the values of arguments.

    Raises:
        ValueError: naming the argument, its value and the range.
    """
    for name, value in given.items():
        if name in OPTIONS:
            OPTIONS[name].range.check(name, value)


def check_group(optimizer: type, known: Iterable[str], group: Mapping[str, Any]) -> None:
    """Check the keys and the values of a param group.

    Arguments of another optimizer than the class, whose groups have the ``known`` ones, are left alone, so that the
    same groups serve several. So are keys of frameworks and schedules, and keys that begin with an underscore.

    Raises:
        ValueError: an argument that holds for all groups, an unknown key, or a value out of its range.
    """
    title, known = optimizer.__name__, set(known)
    for key, value in group.items():
        if key in WHOLE:
            raise ValueError(
                f"{key}={value!r} in a param group: it holds for all groups. Give it to {title}(...) itself"
            )
        if key in OPTIONS or key in OF_OTHERS or key.startswith("_") or _DERIVED.fullmatch(key):
            continue
        meant, offered = nearest(key, known), ", ".join(name for name in _accepted(optimizer) if name in known)
        advice = f"did you mean '{meant}'?" if meant else f"it takes {offered}. Begin a key of your own with _"
        raise ValueError(f"{title}: a param group has {key}={value!r}, which is no argument; {advice}")
    check({key: value for key, value in group.items() if key in known})


_Optimizer = TypeVar("_Optimizer", bound=type)


def documented(optimizer: _Optimizer) -> _Optimizer:
    """Add the sections ``Args`` and ``Raises`` to a class docstring: a class decorator."""
    names = [name for name in inspect.signature(optimizer).parameters if name in OPTIONS]
    whole = ", ".join(name for name in names if OPTIONS[name].whole)
    exceptions = f" except for {whole}" if whole else ""
    entries = [f"params: parameters, or param groups, which may override every argument{exceptions}."]
    for name in names:
        allowed = "" if OPTIONS[name].range is FLAG else f" Must be {OPTIONS[name].range.text}."
        entries.append(f"{name}: {OPTIONS[name].meaning}{allowed}")
    lines = [inspect.cleandoc(optimizer.__doc__ or ""), "", "Args:"]
    for entry in entries:
        lines += textwrap.wrap(entry, 110, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)
    lines += ["", "Raises:", "    TypeError: an argument that the optimizer does not have."]
    lines += ["    ValueError: a value out of its range, or an unknown key in a param group."]
    optimizer.__doc__ = "\n".join(lines)
    return optimizer
