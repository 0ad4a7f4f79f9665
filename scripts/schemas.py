"""Write configs/schemas, the JSON schemas of the run files, for editors: python scripts/schemas.py."""

from __future__ import annotations

import json
from pathlib import Path

from ds_vrgd_recipes.bert.runfile import RunFile as Bert
from ds_vrgd_recipes.clicks.runfile import RunFile as Clicks
from ds_vrgd_recipes.run.runfile import Section
from ds_vrgd_recipes.vision.runfile import RunFile as Vision

SCHEMAS = Path(__file__).resolve().parents[1] / "configs" / "schemas"
RUN_FILES: dict[str, type[Section]] = {"bert": Bert, "dlrm": Clicks, "resnet": Vision}


def schema(model: type[Section]) -> str:
    """Return the JSON schema of a run file as the text of its file."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | model.model_json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for name, model in RUN_FILES.items():
        (SCHEMAS / f"{name}.json").write_text(schema(model), encoding="utf-8")
