"""Run files: YAML pages that pydantic models describe, and the messages where one cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import shortened

# Far above any run file, and far below a page that would take seconds.
_MOST_CHARACTERS = 1 << 18
_MOST_VALUES = 10_000
_LONGEST_VALUE = 3000  # characters; Python prints no longer number
_MOST_PROBLEMS = 20


class Section(BaseModel):
    """A part of a run file. Unknown keys and numbers that are not finite are refused; values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


RunFile = TypeVar("RunFile", bound=Section)


def describe(problem: Any) -> str:
    """Return one line for one pydantic error: key, value, and what to do."""
    key = ".".join(str(part) for part in problem["loc"])
    kind, message, value = problem["type"], problem["msg"].removeprefix("Value error, "), shortened(problem["input"])
    if kind == "extra_forbidden":
        meant = problem.get("meant")
        return f"  {key}={value}: unknown key; " + (f"did you mean {meant}?" if meant else "remove it")
    if kind == "missing":
        return f"  {key}: missing; add it"
    if kind == "value_error":
        return f"  {key}: {message}" if key else f"  {message}"
    return f"  {key}={value}: {message[0].lower()}{message[1:]}; change the value"


def read_run_file(
    path: Path,
    model: type[RunFile],
    example: str,
    describe_error: Callable[[Any], str] = describe,
    overrides: Sequence[str] = (),
) -> RunFile:
    """Read and check a run file. Relative paths in it are relative to the working directory.

    Args:
        example: a complete run file, for messages.
        overrides: values that replace those of the file, such as ``phases.0.lr=1e-3``; see :func:`_override`.

    Raises:
        InputError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    try:
        with path.open(encoding="utf-8") as file:
            content = _parse(file.read(_MOST_CHARACTERS + 1))
    except OSError as error:
        raise InputError(f"--run {path} cannot be read ({error.strerror}); give the path of a run file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"--run {path} is not a YAML file: {error}") from error
    except RecursionError as error:
        raise InputError(f"--run {path} is nested too deeply for a run file; see {example}") from error
    except ValueError as error:
        raise InputError(f"--run {path}: {error}; see {example} for a complete run file") from error
    if not isinstance(content, dict):
        raise InputError(f"--run {path} holds no settings; see {example} for a complete run file")
    for override in overrides:
        _override(content, override)
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [describe_error({**each, "meant": _meant(model, each)}) for each in problems[:_MOST_PROBLEMS]]
        if len(problems) > len(lines):
            lines.append(f"  and {len(problems) - len(lines)} more")
        raise InputError(f"--run {path}:\n" + "\n".join(lines)) from error


def _override(content: dict[str, Any], override: str) -> None:
    """Set one value of a run file in place.

    Args:
        override: ``KEY=VALUE``. The key is a path of names and numbers (from 0) with dots between; the value is YAML.

    Raises:
        InputError: there is no such place in the file, or the value is not YAML.
    """
    key, equals, text = override.partition("=")
    *path, last = key.split(".")
    if not equals or not last:
        raise InputError(f"{shortened(override)} is not KEY=VALUE; write for example phases.0.lr=1e-3")
    node: Any = content
    try:
        for part in path:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[int(last) if isinstance(node, list) else last] = _parse(text)
    except (TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{override}: the run file has no place {key} ({error}); see the file for its keys") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{shortened(override)}: the key or the value cannot be read ({error})") from error


def _meant(model: type[BaseModel], problem: Any) -> str | None:
    """Return the key that an unknown key most resembles, of those that are known in its place; None if there is none.

    Args:
        problem: an error of pydantic.
    """
    if problem["type"] != "extra_forbidden":
        return None
    schema = model.model_json_schema()
    *path, key = problem["loc"]
    nodes = [schema]
    for part in path:
        found = [node for each in nodes for node in _alternatives(schema, each)]
        nodes = [node["items"] for node in found if isinstance(part, int) and "items" in node] or [
            # A property, or the kind of a section, which pydantic puts into the location.
            properties.get(part, node)
            for node in found
            if part in (properties := node.get("properties", {}))
            or part in [each.get("const") for each in properties.values()]
        ]
    known = {name for each in nodes for node in _alternatives(schema, each) for name in node.get("properties", {})}
    return next(iter(difflib.get_close_matches(str(key), sorted(known), n=1)), None)


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a node of a JSON schema may stand for: itself, what it refers to, and each of a union."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    yield node
    for each in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _alternatives(schema, each)


def _parse(text: str) -> Any:
    """Return the content of a YAML page.

    Raises:
        yaml.YAMLError: it is not YAML.
        ValueError: it is too large for a run file, or has a key twice, or a value that Python cannot hold.
        RecursionError: it is nested too deeply.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"it has more than {_MOST_CHARACTERS:,} characters, too many for a run file")
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        # Before anything is built: a few aliases of aliases (*name) can stand for more than memory holds.
        if _count(node, {}) > _MOST_VALUES:
            raise ValueError(f"it stands for more than {_MOST_VALUES:,} values, with its aliases; write them out")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node stands for, each alias as often as it is used."""
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > _LONGEST_VALUE:
            raise ValueError(f"line {node.start_mark.line + 1}: {shortened(node.value)} is too long for a value")
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # for an alias within the node that it stands for
        children = node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
            keys = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in keys:
                    line, name = key.start_mark.line + 1, shortened(key.value)
                    raise ValueError(f"line {line}: the key {name} occurs twice in one section; remove one of them")
                keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        known[id(node)] = 1 + sum(_count(child, known) for child in children)
    return known[id(node)]
