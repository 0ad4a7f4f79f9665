"""Reading a DeepSpeed JSON as DeepSpeed does, with errors that say where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_config(path: Path) -> dict[str, Any]:
    """DeepSpeed's configuration from a file.

    Raises:
        ValueError: naming the file, and the line where it is not JSON; not readable, a key twice, no object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except OSError as error:
        raise ValueError(
            f"--deepspeed_config {path} cannot be read ({error.strerror}); give the path of a DeepSpeed JSON file"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--deepspeed_config {path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        ) from error
    except ValueError as error:
        raise ValueError(f"--deepspeed_config {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(
            f"--deepspeed_config {path} holds a {type(config).__name__}; DeepSpeed wants an object, {{...}}"
        )
    return config


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"the key {twice[0]!r} stands twice in one object; remove one of them")
    return found
