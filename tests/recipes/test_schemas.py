"""The JSON schemas for editors are those of the run files' models, and every run file names its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.schemas import RUN_FILES, SCHEMAS, schema

RUNS = sorted(SCHEMAS.parent.rglob("*.yaml"))


def named_schema(path: Path) -> dict[str, Any]:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert found, f"{path} names no schema in its first line"
    read: dict[str, Any] = json.loads((path.parent / found[1]).read_text(encoding="utf-8"))
    return read


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_schema_is_that_of_its_model(name: str) -> None:
    assert (SCHEMAS / f"{name}.json").read_text(encoding="utf-8") == schema(RUN_FILES[name]), (
        "run python scripts/schemas.py"
    )


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_run_file_fits_the_schema_that_it_names(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), named_schema(path))


def test_a_schema_has_the_descriptions_and_refuses_unknown_keys() -> None:
    bert = json.loads(schema(RUN_FILES["bert"]))
    assert "ready to train on" in bert["properties"]["prepared_data"]["description"]
    run = yaml.safe_load((SCHEMAS.parent / "demo.yaml").read_text(encoding="utf-8"))
    with pytest.raises(jsonschema.ValidationError, match="warmup"):
        jsonschema.validate({**run, "warmup": 3}, bert)
    several = {**run, "corpus": [run["corpus"], {"source": "datasets", "name": "books"}]}
    jsonschema.validate(several, bert)
