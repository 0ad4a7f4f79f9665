"""The keys of a DeepSpeed JSON that DeepSpeed knows, found by watching it read one.

DeepSpeed ignores a key that it does not know at the top of the JSON and in the sections without a pydantic model, so a
misspelt ``zero_optimization`` trains at stage 0. No list says which keys it looks for: it is what ``DeepSpeedConfig``
asks of a dict.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger
from pydantic import BaseModel, ValidationError

from ds_vrgd.optim.options import nearest

#: Sections with a pydantic model, which forbids unknown keys, and where ``DeepSpeedConfig`` keeps it.
MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "compile": "compile_config",
    "tensor_parallel": "tensor_parallel_config",
    "hybrid_engine": "hybrid_engine",
}
#: Sections without a model that are read key by key.
OPEN = {
    "optimizer", "scheduler", "checkpoint", "data_types", "activation_checkpointing", "torch_autocast",
    "data_efficiency", "aio", "flops_profiler",
}  # fmt: skip
#: What ``deepspeed.initialize`` reads before there is a DeepSpeedConfig.
BEFORE = {"data_parallel_size", "sequence_parallel_size"}
# How alike two keys must be for one to be a slip of the other: "comment" is not "comet", "lr_scheduler" is "scheduler".
ALIKE = 0.85
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class UnknownKey(NamedTuple):
    """A key that DeepSpeed ignores, with its section before it, and the key that it may be a slip of, or None."""

    path: str
    nearest: str | None

    def __str__(self) -> str:
        guess = "" if self.nearest is None else f'; did you mean "{self.nearest}"?'
        return f'"{self.path}" is no key of DeepSpeed {deepspeed.__version__}, which ignores it{guess}'


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


def unknown_keys(config: Mapping[str, Any]) -> list[UnknownKey]:
    """Return the keys that DeepSpeed ignores. Names that begin with an underscore are comments."""
    known = _read(frozenset())[1][""] & OPEN
    sections = frozenset(name for name, value in config.items() if isinstance(value, dict) and name in known)
    found = []
    for name, asked in sorted(_read(sections)[1].items()):
        path = f"{name}." if name else ""
        for key in map(str, (config[name] if name else config) if asked else ()):
            if key not in asked and not key.startswith("_"):
                near = nearest(key, asked, ALIKE)
                found.append(UnknownKey(f"{path}{key}", near and f"{path}{near}"))
    return found


def faulty_values(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what DeepSpeed's own models reject in the sections that have one: the key, its value, and why."""
    read = _read(frozenset())[0]
    for name, attribute in MODELS.items():
        section, model = config.get(name), type(getattr(read, attribute, None))
        if not isinstance(section, dict) or not issubclass(model, BaseModel):
            continue
        try:
            with _quiet():
                model(**section)
        except ValidationError as error:
            for fault in error.errors():
                path = ".".join([name, *map(str, fault["loc"])])
                if fault["type"] == "extra_forbidden":
                    near = nearest(str(fault["loc"][-1]), _fields(model), ALIKE)
                    guess = "" if near is None else f'; did you mean "{near}"?'
                    yield f'"{path}" is no key of DeepSpeed {deepspeed.__version__}{guess}'
                else:
                    value = "" if isinstance(fault["input"], (dict, BaseModel)) else f"={fault['input']!r}"
                    yield f"{path}{value}: {fault['msg']}"
        except (TypeError, ValueError, AssertionError) as error:
            yield f"{name}: {error}"


def _fields(model: type[BaseModel]) -> set[str]:
    """Return the names of a model's fields, their aliases, and the names in the models inside it."""
    found = set()
    for name, field in model.model_fields.items():
        found |= {name, field.alias or name}
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _fields(kind)
    return found


def rejected(config: Mapping[str, Any]) -> str | None:
    """Return why DeepSpeed cannot read a JSON on one rank, whatever its batch sizes; None where it can."""
    without = {name: value for name, value in copy.deepcopy(dict(config)).items() if name not in SIZES}
    try:
        with _quiet():
            DeepSpeedConfig({**without, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # DeepSpeed raises whatever a wrong type leads to
        return " ".join(str(error).split()) or type(error).__name__
    return None
