"""The benchmark of pre-training trains both ways on the CPU, and finds one loss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks import report
from benchmarks.pretraining_table import lines
from benchmarks.record import read_runs
from ds_vrgd_recipes.bert.prepare import prepare
from ds_vrgd_recipes.bert.runfile import RunFile
from tests.recipes.bert.cases import corpus_text, run_settings

pytestmark = pytest.mark.slow

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
    (run,) = read_runs(tmp_path)
    rows = run["pretraining"]
    assert [(row["way"], row["sequence_length"]) for row in rows] == [
        ("plain", 24), ("packed", 24), ("plain", 32), ("packed", 32),
    ]  # fmt: skip
    for plain, packed in zip(rows[::2], rows[1::2], strict=True):
        assert packed["loss"] == pytest.approx(plain["loss"], rel=1e-3)  # the network computes in bf16
        assert plain["sequences_per_second"]["count"] == packed["waited_for_data"]["count"] == 6
    text = "\n".join(report.section(run))
    assert all(f"{row['sequences_per_second']['median']:,.0f} (" in text for row in rows)


def test_every_kernel_has_its_kind_and_the_sums_are_those_of_the_step() -> None:
    """A step of 2 x 5 sequences at 100 a second is 100 ms; 90 ms of kernels, of which 85 are listed."""
    names = {"nvjet_sm90": 40.0, "flash_fwd_kernel": 20.0, "GeluCUDAKernelImpl": 10.0, "vectorized_layer_norm": 8.0,
             "_merge": 4.0, "Memset": 3.0}  # fmt: skip
    row = {"way": "packed", "sequence_length": 128, "micro_batch": 2, "accumulation": 5, "real_tokens": 0.5,
           "sequences_per_second": {"median": 100.0, "p10": 99.0, "p90": 101.0}, "waited_for_data": {"median": 0.002},
           "first_step_seconds": 1.0, "peak_bytes": 0, "loss": 11.0,
           "kernels": [{"name": name, "ms": ms, "share": ms / 90.0} for name, ms in names.items()]}  # fmt: skip
    text = "\n".join(lines([row, row | {"way": "plain"}]))
    assert "| packed | 128 | 2 x 5 | 100 (99–101) | 1.00 | 6,400 | 2.0 | 1.0 | – | 11.0000 |" in text
    assert "| packed | 128 | 100 | 20 | 40 | 10 | 8 | 4 | 3 | 5 |" in text
