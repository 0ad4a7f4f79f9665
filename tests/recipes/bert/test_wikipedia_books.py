"""docs/BERT.md from start to end, on folders that load_dataset reads as it reads the hub's data sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ds_vrgd_recipes.bert.prepare_main import main as prepare
from tests.recipes.bert.cases import corpus_text
from tests.recipes.bert.launching import ROOT, SCRIPT

RUN = str(ROOT / "configs" / "wikipedia-books.yaml")
#: What the page changes to run on the stand-in.
SMALL = [
    *("corpus.0.name=standin/wikipedia", "corpus.1.name=standin/bookcorpus", "corpus.1.rows_per_document=8"),
    *("vocabulary={size: 256}", "held_out_every=5", "loader_workers=0", "evaluation_sequences=64"),
    "model={num_hidden_layers: 1, hidden_size: 16, num_attention_heads: 2, intermediate_size: 32}",
    *(f"phases.{phase}.{key}" for phase in (0, 1) for key in ("global_batch=16", "micro_batch=2", "steps=2")),
]


def stand_in(folder: Path) -> None:
    """Two data sets with the configurations, columns and kinds of files of those on the hub."""
    articles = corpus_text(120, seed=1).split("\n\n")
    wikipedia, books = folder / "wikipedia", folder / "bookcorpus"
    for path in (wikipedia / "20231101.en", books / "plain_text" / "train"):
        path.mkdir(parents=True)
    for number, part in enumerate((articles[:60], articles[60:])):
        columns = {name: [f"{name} {row}" for row in range(len(part))] for name in ("id", "url", "title")}
        pq.write_table(pa.table({**columns, "text": part}), wikipedia / "20231101.en" / f"train-{number:05d}.parquet")
    (wikipedia / "README.md").write_text(
        "---\nconfigs:\n- {config_name: 20231101.en, data_files: 20231101.en/*}\n---\n", encoding="utf-8"
    )
    sentences = [line for line in corpus_text(60, seed=2).split("\n") if line]
    pq.write_table(pa.table({"text": sentences}), books / "plain_text" / "train" / "0000.parquet")


@pytest.mark.slow
def test_from_data_sets_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path / "standin")
    assert prepare(["--run", RUN, *SMALL, "--processes", "0"]) == 0
    manifest = json.loads(Path("corpus/prepared/manifest.json").read_text())
    sentences = len([line for line in corpus_text(60, seed=2).split("\n") if line])
    assert manifest["source"]["documents"] == 120 + -(-sentences // 8)
    command = [sys.executable, str(SCRIPT), "--deepspeed_config", str(ROOT / "configs" / "ds_vrgd.json"), "--run", RUN]
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = f"{ROOT}:{ROOT / 'recipes'}"

    def run(*more: str) -> str:
        done = subprocess.run(
            [*command, "--output", "out/bert", *SMALL, *more],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert f"data: {Path('corpus/prepared')}, ready\n" in run("--dry-run")
    assert not Path("out").exists()
    assert run().splitlines()[-1].startswith("held-out mlm loss ")
    assert "standin/wikipedia` `20231101.en`" in Path("out/bert/model/README.md").read_text()
