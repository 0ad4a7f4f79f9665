"""Plans of run files: counts by arithmetic, parameters against the model itself, memory against what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vrgd_cli import main
from ds_vrgd_recipes.bert.model import PretrainingModel, bert_config
from ds_vrgd_recipes.bert.plan import GB, activation_bytes, parameters, plan, state_bytes
from ds_vrgd_recipes.bert.pretrain import Pretraining
from ds_vrgd_recipes.bert.runfile import RunFile, load_run_file
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.loop import train
from tests.recipes.bert.cases import run_settings
from tests.support.ranks import run_on_ranks

CONFIGS = Path(__file__).parents[3] / "configs"
PAPER = sorted((CONFIGS / "bert-large").glob("*.yaml"))
VRLAMB = json.loads((CONFIGS / "ds_vrgd.json").read_text())
#: VRGD paper, table 1: batch of both phases in 1,024 sequences, and updates of both together.
ROWS = {
    "16k": (16, 16, 31250),
    "32k": (32, 32, 15625),
    "64k-32k": (64, 32, 8599),
    "64k": (64, 64, 7820),
    "96k-32k": (96, 32, 6256),
    "96k": (96, 96, 5214),
    "128k-64k": (128, 64, 4301),
}


def optimizers_of(path: Path) -> list[str]:
    return ["ds_adamw.json"] if path.stem.endswith("-adamw") else ["ds_vrgd.json", "ds_lamb.json"]


def two_updates(rank: int, data: Path, output: Path) -> list[str]:
    """Every shipped run file with a toy model, an update a phase."""
    toy = RunFile.model_validate(run_settings(data))
    said = []
    for path in PAPER:
        run = load_run_file(path)
        small = {"steps": 1, "global_batch": 4, "micro_batch": 2}
        phases = [phase.model_copy(update=small) for phase in run.phases]
        own = {"model": toy.model, "corpus": toy.corpus, "vocabulary": toy.vocabulary, "prepared_data": output / "data"}
        run = run.model_copy(update={**own, "phases": phases, "evaluation_sequences": 4, "loader_workers": 0})
        for name in optimizers_of(path):
            config = json.loads((CONFIGS / name).read_text())
            said.append(train(Pretraining(run), config, output / f"{path.stem} {name}", None))
    return said


@pytest.mark.slow
def test_every_run_file_trains_two_updates(corpus_folder: Path, tmp_path: Path) -> None:
    said = run_on_ranks(1, two_updates, corpus_folder, tmp_path)[0]
    assert len(said) == 7 * 3
    assert all(line.startswith("held-out mlm loss ") for line in said)


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_run_files_are_the_rows_of_the_paper(path: Path) -> None:
    first, second, updates = ROWS[path.stem.removesuffix("-adamw")]
    run = load_run_file(path)
    assert [phase.sequence_length for phase in run.phases] == [128, 512]
    assert [phase.global_batch for phase in run.phases] == [1024 * first, 1024 * second]
    assert sum(run.phase_steps) == updates
    assert run.phase_steps[0] == round(0.9 * updates)
    for phase in run.phases:
        base = (
            1e-4 * (phase.global_batch / 256) ** 0.5
            if "adamw" in path.stem
            else 5e-3 * (phase.global_batch / 32768) ** 0.5
        )
        assert phase.lr == pytest.approx(base, rel=2e-3)  # square-root scaling, rounded
        assert phase.warmup_ratio == pytest.approx(0.2 * phase.global_batch / 32768)  # LEGW


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_every_run_file_can_be_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--run", str(path), "--gpus", "64", "--gpu-memory", "80"]
    config = CONFIGS / optimizers_of(path)[0]
    assert main([*command, "--deepspeed_config", str(config), "--sequences-per-second", "1000", "250"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    run = load_run_file(path)
    for phase, line, speed in zip(run.phases, printed[1:3], (1000, 250), strict=True):
        cells = line.replace(",", "").split()
        micro_batch, accumulation, chunks = map(int, cells[4:7])
        assert micro_batch * accumulation * 64 == phase.global_batch
        assert chunks == accumulation * 64
        assert float(cells[8]) == pytest.approx(phase.steps * phase.global_batch / (64 * speed * 3600), abs=0.06)


def large() -> RunFile:
    return load_run_file(CONFIGS / "bert-large/64k-32k.yaml")


@pytest.mark.parametrize("pieces", [30522, 999])
def test_parameters_are_counted_as_the_model_has_them(pieces: int) -> None:
    model = large().model
    with torch.device("meta"):
        counted = sum(param.numel() for param in PretrainingModel(bert_config(model, pieces)).parameters())
    assert parameters(model, pieces) == counted


def test_memory_beside_a_measured_peak() -> None:
    """docs/MEASUREMENTS.md, 2026-11-28 06:55 UTC, stage 2, accumulation 4, two GPUs, micro-batch 128: 21.81 GB.

    That was the padded model with logits at all positions: in bf16, their gradient, and what cross-entropy keeps.
    """
    config = {**VRLAMB, "optimizer": {"type": "VRLAMB", "params": {"gamma": 0.1, "gsnr_dtype": "bfloat16"}}}
    run, logits = large(), 128 * 128 * 30528 * 2
    estimate = state_bytes(config, parameters(run.model, 30522), 2) + activation_bytes(run, 128, 128) + 2 * logits
    assert estimate / GB == pytest.approx(21.81, rel=0.1)


def test_activation_checkpointing_leaves_an_input_a_layer() -> None:
    run = large()
    checkpointed = run.model_copy(update={"activation_checkpointing": True})
    saved = activation_bytes(run, 128, 8) - activation_bytes(checkpointed, 128, 8)
    assert saved == (34 * 24 - (2 * 24 + 34)) * 128 * 8 * 1024


@pytest.mark.parametrize(
    "stage, arguments, held",
    # weights; of the shard: master, two moments; GSNR's average and the chunks' moments, or the gradient
    [(1, {}, 2 + (12 + 12) / 4), (2, {"gsnr_dtype": "bfloat16"}, 2 + 22 / 4), (3, {}, 26 / 4), (0, {"gamma": 1.0}, 16)],
)
def test_state_by_hand(stage: int, arguments: dict[str, Any], held: float) -> None:
    config = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "VRLAMB", "params": arguments}}
    buffers = 0 if stage == 0 else 5 * 2**26
    assert state_bytes(config, 4_000_000, 4) == pytest.approx(held * 4_000_000 + buffers)


@pytest.mark.parametrize(
    "gpus, memory, speeds, message",
    [
        (96, 80 * GB, None, "65536 is not a multiple of --gpus 96"),
        (64, 5 * GB, None, "more than --gpu-memory 5; use more GPUs"),
        (64, None, [1.0], "1 speeds for 2 phases"),
        (100, None, None, "micro_batch=64 x ranks=100"),
    ],
)
def test_what_cannot_be_planned(gpus: int, memory: float | None, speeds: list[float] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(large(), VRLAMB, gpus, memory, speeds)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(CONFIGS / "demo.yaml")
    assert main(["plan", "--run", path, "--gpus", "0"]) == 2
    assert main(["plan", "--run", path, "--gpus", "2", "--deepspeed_config", str(tmp_path / "none.json")]) == 2
    assert main(["plan", "--run", "dlrm/criteo-128k.yaml", "--gpus", "2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [error.startswith("error: ") for error in errors] == [True, True, True]
    assert "is a run file of DLRM. Give one of BERT" in errors[2]
