"""The script itself: two ranks, a resumed run, one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, BertForPreTraining

from ds_vrgd_recipes.run.log import read_log
from tests.recipes.bert.cases import run_settings
from tests.recipes.bert.launching import ROOT, Launch, Whole, launch

pytestmark = pytest.mark.slow

LAYERS = {"layer_names", "layers"}
LAST_LINE = re.compile(r"^held-out mlm loss (\d+\.\d+) \(unigram entropy (\d+\.\d+)\)$")


@dataclass(frozen=True)
class Runs:
    folder: Path
    whole: Launch  # two ranks
    resumed: Launch  # two ranks, from the third of six updates, in mid-phase
    alone: Launch  # one rank
    arguments: list[str]


@pytest.fixture(scope="module")
def runs(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "whole").symlink_to(whole.output)
    middle = folder / "whole" / "checkpoints" / "step-000003"
    resumed = launch(2, *whole.arguments, str(folder / "resumed"), "--resume", str(middle))
    alone = launch(1, *whole.arguments, str(folder / "alone"))
    return Runs(folder, whole.launch, resumed, alone, whole.arguments)


def updates(folder: Path) -> list[dict[str, Any]]:
    """Records of the updates, without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if not name.endswith(("_per_second", "memory_gb"))}
        for record in read_log(folder)
        if "loss" in record
    ]


def test_two_phases_from_a_json_and_a_run_file(runs: Runs) -> None:
    assert LAST_LINE.match(runs.whole.stdout.splitlines()[-1])
    records = updates(runs.folder / "whole")
    assert [record["phase"] for record in records] == [1, 1, 1, 1, 2, 2]
    # 16 and 24 sequences in micro-batches of 2: the chunks of each update
    assert [record["gsnr"]["k"] for record in records] == [8, 8, 8, 8, 12, 12]
    assert [record["gsnr"]["batch"] for record in records] == [16, 16, 16, 16, 24, 24]
    assert all(record["gsnr"]["noise_trace"] > 0.0 for record in records)
    names, *layers = [record for record in read_log(runs.folder / "whole") if not record.keys().isdisjoint(LAYERS)]
    assert "network.bert.embeddings.word_embeddings.weight" in names["layer_names"]
    assert [(record["step"], len(record["layers"]["trace"])) for record in layers] == [
        (step, len(names["layer_names"])) for step in range(1, 7)
    ]
    # warm-up of one update, decay over three; again from the peak of phase 2, whose warm-up is one update
    assert [record["lr"] for record in records] == pytest.approx([0.02, 0.02, 0.04 / 3, 0.02 / 3, 0.01, 0.01])


def test_what_a_run_leaves(runs: Runs) -> None:
    output = runs.folder / "whole"
    model = BertForPreTraining.from_pretrained(output / "model")
    assert model.config.max_position_embeddings == 512
    assert len(AutoTokenizer.from_pretrained(output / "model")) <= model.config.vocab_size
    assert (output / "training.png").stat().st_size > 0
    loss_rows = (output / "csv" / "Train_loss.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in loss_rows] == ["step", "1", "2", "3", "4", "5", "6"]
    scale_rows = (output / "csv" / "NoiseScale_value.csv").read_text(encoding="utf-8").splitlines()
    assert all(float(row.split(",")[1]) > 0.0 for row in scale_rows[1:])
    assert list((output / "tensorboard").glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (output / "checkpoints").glob("step-*")) == [
        "step-000003",
        "step-000004",
        "step-000006",
    ]
    evaluated = [record["step"] for record in read_log(output) if "held_out_masked_lm_loss" in record]
    assert evaluated == [3, 4, 6]


def test_resumed_in_another_output_it_is_the_same_run(runs: Runs) -> None:
    """Bitwise: weights, moments, GSNR average, schedule, data, masks and dropout all go on where they were."""
    assert runs.resumed.status == 0, runs.resumed.stderr
    assert updates(runs.folder / "resumed") == updates(runs.folder / "whole")[3:]
    assert runs.resumed.stdout.splitlines()[-1] == runs.whole.stdout.splitlines()[-1]
    whole, resumed = (
        BertForPreTraining.from_pretrained(runs.folder / name / "model").state_dict() for name in ("whole", "resumed")
    )
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_one_rank_follows_the_trajectory_of_two(runs: Runs) -> None:
    """The same chunks, so the same run up to the order of sums in fp32."""
    assert runs.alone.status == 0, runs.alone.stderr
    alone = [record["loss"] for record in updates(runs.folder / "alone")]
    assert alone == pytest.approx([record["loss"] for record in updates(runs.folder / "whole")], rel=1e-5)


def test_compiled_it_is_the_same_run(corpus_folder: Path, tmp_path: Path) -> None:
    """Without dropout, whose numbers compiled code draws in another way; up to the order of sums in fp32."""
    records = {}
    for compiled in (False, True):
        settings = run_settings(corpus_folder, compile=compiled)
        settings["model"] |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        output = tmp_path / f"compiled-{compiled}"
        arguments = ["--config", str(ROOT / "configs" / "ds_vrgd.json"), "--run", str(tmp_path / "run.yaml")]
        done = launch(2, *arguments, "--output", str(output))
        assert done.status == 0, done.stderr
        records[compiled] = [record["loss"] for record in updates(output)]
    assert records[True] == pytest.approx(records[False], rel=1e-5)


def test_a_second_run_says_what_is_there_and_overwrites_nothing(runs: Runs) -> None:
    output = runs.folder / "whole"
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    again = launch(1, *runs.arguments, str(output))
    assert again.status == 0
    assert "already holds this run, finished" in again.stdout
    assert LAST_LINE.match(again.stdout.splitlines()[-1])
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_errors_are_one_message_before_training(runs: Runs, tmp_path: Path) -> None:
    refused = launch(1, *runs.arguments, str(tmp_path / "new"), "--resume", str(tmp_path))
    assert refused.status == 2
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: --resume {tmp_path} is not a checkpoint of a run; give the --output of an earlier run, "
        "its folder checkpoints, or one step-... folder in there"
    ]
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "new").exists()
