"""A DeepSpeed JSON: read with errors that name the line, and checked for what DeepSpeed ignores or refuses in it.

DeepSpeed ignores a key that it does not know at the top of the JSON and in the sections without a pydantic model, so a
misspelt ``zero_optimization`` trains at stage 0. No list says which keys it looks for: it is what ``DeepSpeedConfig``
asks of a dict.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError

from ds_vrgd.optim.options import nearest

#: Sections without a pydantic model, which would forbid unknown keys, that are read key by key.
OPEN = {
    "optimizer", "scheduler", "checkpoint", "data_types", "activation_checkpointing", "torch_autocast",
    "data_efficiency", "aio", "flops_profiler",
}  # fmt: skip
#: What ``deepspeed.initialize`` reads before there is a DeepSpeedConfig.
BEFORE = {"data_parallel_size", "sequence_parallel_size"}
# How alike two keys must be for one to be a slip of the other: "comment" is not "comet", "lr_scheduler" is "scheduler".
ALIKE = 0.85
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(path: Path) -> dict[str, Any]:
    """Return DeepSpeed's configuration from a file.

    Raises:
        ValueError: the file cannot be read, is not a JSON object, or has a key twice; the file, and the line where it
            is not JSON, are named.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(
            text, object_pairs_hook=dict_raise_error_on_duplicate_keys, parse_float=_finite, parse_constant=_finite
        )
    except OSError as error:
        reason = f" cannot be read ({error.strerror}); give the path of a DeepSpeed JSON file"
    except json.JSONDecodeError as error:
        reason = f" is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        reason = " is nested too deeply to be read; simplify it"
    except ValueError as error:
        reason = f": {error}"
    else:
        if isinstance(config, dict):
            return config
        reason = f" holds a {type(config).__name__}; DeepSpeed wants an object, {{...}}"
    raise ValueError(f"--deepspeed_config {path}{reason}")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number; give one")
    return value


def did_you_mean(key: str, known: Iterable[str], path: str = "") -> str:
    """Return the question whether ``key`` is a slip of one of ``known``, to be added to a message; "" if it is none."""
    near = nearest(key, known, ALIKE)
    return "" if near is None else f'; did you mean "{path}{near}"?'


class _Asked(dict[str, Any]):
    """A section that remembers which keys it was asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:  # DeepSpeed asks `key in section.keys()`
        return self


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep DeepSpeed from logging: it logs to standard output, and will log the same for the engine."""
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


@functools.cache
def _read(sections: frozenset[str]) -> tuple[DeepSpeedConfig, dict[str, set[str]]]:
    """Return DeepSpeed's reading of an empty JSON, and the keys that it asked for by section ("" for the top)."""
    inner = {name: _Asked({"type": "any"} if name in ("optimizer", "scheduler") else {}) for name in sections}
    top = _Asked({"train_micro_batch_size_per_gpu": 1, **inner})
    with _quiet():
        config = DeepSpeedConfig(top)
    return config, {"": top.asked | BEFORE} | {name: section.asked for name, section in inner.items()}


def unknown_keys(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return a message for each key that DeepSpeed ignores, and whether it is a slip of one that DeepSpeed knows.

    Names that begin with an underscore are comments.
    """
    known = _read(frozenset())[1][""] & OPEN
    sections = frozenset(name for name, value in config.items() if isinstance(value, dict) and name in known)
    found = {}
    for name, asked in sorted(_read(sections)[1].items()):
        path = f"{name}." if name else ""
        for key in map(str, (config[name] if name else config) if asked else ()):
            if key not in asked and not key.startswith("_"):
                guess = did_you_mean(key, asked, path)
                text = f'"{path}{key}" is no key of DeepSpeed {deepspeed.__version__}, which ignores it{guess}'
                found[text] = bool(guess)
    return found


def faults_of(config: Mapping[str, Any], *, together: bool) -> list[str]:
    """Return why DeepSpeed cannot read a JSON on one rank, whatever its batch sizes.

    It reads each section alone, so that every fault is found, and with ``together`` also all of them if none has one.
    """
    rest = {name: value for name, value in config.items() if name not in SIZES}
    found = [fault for name, value in rest.items() for fault in _rejected({name: value}, name)]
    return found or list(_rejected(rest) if together else ())


def _rejected(config: Mapping[str, Any], section: str = "") -> Iterator[str]:
    try:
        with _quiet():
            DeepSpeedConfig({**copy.deepcopy(dict(config)), "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        models = {type(model).__name__: type(model) for model in vars(_read(frozenset())[0]).values()}
        for fault in error.errors():
            path = ".".join(filter(None, [section, *map(str, fault["loc"])]))
            if fault["type"] == "extra_forbidden":
                known = _fields(models[error.title]) if error.title in models else ()
                guess = did_you_mean(str(fault["loc"][-1]), known)
                yield f'"{path}" is no key of DeepSpeed {deepspeed.__version__}{guess}'
            else:
                value = "" if isinstance(fault["input"], (dict, BaseModel)) else f"={fault['input']!r}"
                yield f"{path}{value}: {fault['msg']}"
    except Exception as error:  # DeepSpeed raises whatever a wrong type leads to
        if not section:  # alone it may lack what it needs of another section
            yield f"DeepSpeed cannot read the configuration: {' '.join(str(error).split()) or type(error).__name__}"


def _fields(model: type[BaseModel]) -> set[str]:
    """Return the names of a model's fields, their aliases, and the names in the models inside it."""
    found = set()
    for name, field in model.model_fields.items():
        found |= {name, field.alias or name}
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _fields(kind)
    return found
