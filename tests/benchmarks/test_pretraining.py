"""The benchmark of pre-training trains both ways on the CPU, and finds one loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ds_vrgd.bert.prepare import prepare
from ds_vrgd.bert.runfile import RunFile
from tests.bert.cases import corpus_text, run_settings

ROOT = Path(__file__).parents[2]


def test_padded_and_packed_have_one_loss(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text(corpus_text(), encoding="utf-8")
    settings = run_settings(tmp_path / "corpus", prepared_data=str(tmp_path / "data"))
    run = RunFile.model_validate(settings)
    prepare(run.data_settings, run.sequence_lengths, tmp_path / "data", report=lambda text: None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "benchmarks.pretraining", "--run", str(tmp_path / "run.yaml")]
    command += ["--micro-batches", "2", "2", "--accumulation", "2", "--ways", "plain", "packed"]
    subprocess.run([*command, "--output", str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=300)
    (path,) = tmp_path.glob("pretraining-run-*.json")
    rows = json.loads(path.read_text())["pretraining"]
    assert [(row["way"], row["sequence_length"]) for row in rows] == [
        ("plain", 24), ("packed", 24), ("plain", 32), ("packed", 32),
    ]  # fmt: skip
    for plain, packed in zip(rows[::2], rows[1::2], strict=True):
        assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-3)  # the network computes in bf16
        assert plain["sequences_per_second"]["count"] == packed["waited_for_data"]["count"] == 6
