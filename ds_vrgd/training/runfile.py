"""Run files: YAML pages that pydantic models describe, and what is said where one cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ds_vrgd.training.errors import InputError


class Section(BaseModel):
    """Part of a run file: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


RunFile = TypeVar("RunFile", bound=Section)


def describe(problem: Any) -> str:
    """One line for one pydantic error: key, value, and what to do."""
    key = ".".join(str(part) for part in problem["loc"])
    kind, message, value = problem["type"], problem["msg"].removeprefix("Value error, "), problem["input"]
    if kind == "extra_forbidden":
        return f"  {key}={value!r}: unknown key; remove it or correct its spelling"
    if kind == "missing":
        return f"  {key}: missing; add it"
    if kind == "value_error":
        return f"  {key}: {message}" if key else f"  {message}"
    return f"  {key}={value!r}: {message[0].lower()}{message[1:]}; change the value"


def read_run_file(
    path: Path, model: type[RunFile], example: str, describe_error: Callable[[Any], str] = describe
) -> RunFile:
    """Read and check a run file. Relative paths in it are relative to the working directory.

    Args:
        example: a complete run file, for the message that there is nothing in this one.

    Raises:
        InputError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--run {path} cannot be read ({error.strerror}); give the path of a run file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--run {path} is not a YAML file: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"--run {path} holds no settings; see {example} for a complete run file")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise InputError(
            f"--run {path}:\n" + "\n".join(describe_error(problem) for problem in error.errors())
        ) from error
