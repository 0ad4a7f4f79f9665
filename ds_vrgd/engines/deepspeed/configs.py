"""Read a DeepSpeed JSON as DeepSpeed does, with errors that name the line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def read_config(path: Path) -> dict[str, Any]:
    """Return DeepSpeed's configuration from a file.

    Raises:
        ValueError: the file cannot be read, is not a JSON object, or has a key twice; the file, and the line where it
            is not JSON, are named.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is there twice in one object; remove one of them")
        found[key] = value
    return found
