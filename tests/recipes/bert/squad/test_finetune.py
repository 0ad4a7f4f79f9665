"""Training and the whole command: twenty questions learned by heart, what is written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import BertForQuestionAnswering

from ds_vrgd_recipes.bert.model import bert_config
from ds_vrgd_recipes.bert.squad.data import read_squad
from ds_vrgd_recipes.bert.squad.main import main
from ds_vrgd_recipes.bert.squad.metric import score
from ds_vrgd_recipes.bert.squad.training import _optimizer, batch_order, window_loss
from ds_vrgd_recipes.bert.squad.windows import WindowSize, tokenise
from ds_vrgd_recipes.run.locks import locked_output
from tests.recipes.bert.squad.cases import MODEL, small_tokenizer, squad, twenty_questions, write

SIZES = ["--max-length", "40", "--doc-stride", "12", "--max-question-length", "8", "--max-answer-length", "4"]
TRAINING = ["--batch-size", "16", "--lr", "3e-3", "--weight-decay", "0", "--n-best", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved BERT with random weights, and twenty questions."""
    folder = tmp_path_factory.mktemp("squad")
    tokenizer = small_tokenizer()
    torch.manual_seed(0)
    BertForQuestionAnswering(bert_config(MODEL, len(tokenizer))).save_pretrained(folder / "model")
    tokenizer.save_pretrained(str(folder / "model"))
    write(folder / "twenty.json", twenty_questions())
    return folder


def run(folder: Path, output: Path, *options: str) -> int:
    """Whatever a seed leaves to chance on the CPU is the same each time."""
    asked = ["--predict-file", str(folder / "twenty.json"), "--output", str(output)]
    return main(["--model", str(folder / "model"), *asked, *SIZES, *options])


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "optimizer",
    [
        ("--epochs", "60"),
        pytest.param(("--epochs", "40", "--optimizer", "VRAdamW", "--micro-batch", "4"), marks=pytest.mark.slow),
    ],
)
def test_twenty_questions_are_learned_by_heart(
    folder: Path, tmp_path: Path, optimizer: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = ["--train-file", str(folder / "twenty.json"), "--seeds", "3", *TRAINING, *optimizer]
    assert run(folder, tmp_path / "out", *trained) == 0
    result = read(tmp_path / "out" / "result.json")
    assert result["median"]["f1"] > 90, result
    seed = tmp_path / "out" / "seed-3"
    predictions, nbest = read(seed / "predictions.json"), read(seed / "nbest_predictions.json")
    source = read_squad(folder / "twenty.json", "--predict-file")
    assert score(source.truths(), predictions).f1 == result["median"]["f1"]
    for item in source.items:
        assert 1 <= len(nbest[item.id]) <= 3
        assert nbest[item.id][0]["text"] == predictions[item.id]
        assert sum(each["probability"] for each in nbest[item.id]) == pytest.approx(1)
        assert all(each["text"] in source.contexts[item.context] for each in nbest[item.id])
    assert capsys.readouterr().out.splitlines()[-1] == result["summary"]

    # The saved model gives the same answers again, without training.
    asked = ["--model", str(seed / "model"), "--predict-file", str(folder / "twenty.json")]
    assert main([*asked, "--output", str(tmp_path / "again"), *SIZES]) == 0
    assert read(tmp_path / "again" / "seed-1" / "predictions.json") == predictions


def test_several_seeds_and_their_median(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = read(folder / "twenty.json")
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    shifted = write(tmp_path / "shifted.json", content)
    trained = ["--train-file", str(shifted), "--from-scratch", "--epochs", "2", "--seeds", "1", "2", "5", *TRAINING]
    assert run(folder, tmp_path / "out", *trained) == 0
    result = read(tmp_path / "out" / "result.json")
    assert [each["seed"] for each in result["seeds"]] == [1, 2, 5]
    assert len({each["loss"] for each in result["seeds"]}) == 3
    for name in ("f1", "exact_match"):
        assert result["median"][name] == sorted(each[name] for each in result["seeds"])[1]
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].endswith("median over 3 seeds")
    assert "--train-file: 1 questions left out: their answer is not at its answer_start (short-Ada)" in printed
    assert "weights: random, in the shape of" in printed


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--train-file", "gone.json"], "--train-file gone.json cannot be read"),
        (["--batch-size", "9", "--micro-batch", "2"], "--batch-size 9 is not a multiple of --micro-batch 2"),
        (["--optimizer", "VRLAMB"], "--optimizer VRLAMB with --batch-size 32 in one piece is k = 1 chunk"),
        (["--seeds", "1", "1"], "names one twice"),
        (["--from-scratch"], "--from-scratch and several --seeds are for training; give a --train-file"),
        (["--lr", "0"], "--lr 0.0: Input should be greater than 0"),
        (["--lr", "inf"], "--lr inf: Input should be a finite number"),
        (["--max-length", "72"], "--max-length 72 is more than the 64 positions"),
        (["--max-length", "11"], "--max-length 11 leaves no space"),
    ],
)
def test_what_cannot_be_used(
    folder: Path, tmp_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "out", *options) == 2
    assert f"error: {expected}" in capsys.readouterr().err.replace("--seeds [1, 1] names", "names")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_and_a_batch_is_filled(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    assert run(folder, tmp_path) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    train = ["--train-file", str(folder / "twenty.json"), "--batch-size", "4096"]
    assert run(folder, tmp_path / "out", *train) == 2
    assert "--batch-size 4096 is more than the" in capsys.readouterr().err


def test_an_output_that_is_in_use(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with patch("ds_vrgd_recipes.run.locks._PATIENCE", 0.0), locked_output(tmp_path / "out", "fine-tuning"):
        assert run(folder, tmp_path / "out") == 2
    assert "error: another process is fine-tuning (process " in capsys.readouterr().err


def test_a_gradient_that_is_never_finite_ends_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_nan(model: torch.nn.Module, *arguments: Any) -> torch.optim.Optimizer:
        next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
        return _optimizer(model, *arguments)

    train = ["--train-file", str(folder / "twenty.json"), "--epochs", "9", *TRAINING]
    with (
        patch("ds_vrgd_recipes.bert.squad.training._optimizer", with_nan),
        patch("ds_vrgd_recipes.run.loop._MOST_SKIPPED_UPDATES", 3),
    ):
        assert run(folder, tmp_path / "out", *train, "--optimizer", "VRAdamW", "--micro-batch", "4") == 1
    assert "error: seed 1, update 4: 4 updates in a row were skipped" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["--train-file", str(folder / "twenty.json"), "--epochs", "9", "--lr", "1e30", "--warmup-ratio", "0"]
    assert run(folder, tmp_path / "out", *train) == 1
    assert "the loss is nan; lower --lr" in capsys.readouterr().err


def test_batches_hold_every_window_once_an_epoch_and_like_lengths_together() -> None:
    lengths = np.random.default_rng(1).integers(10, 400, size=4000)
    order = batch_order(lengths, 2, 16, seed=3)
    assert order.shape == (500, 16)
    assert (np.bincount(order.ravel(), minlength=4000) == 2).all()
    padding = (lengths[order].max(axis=1, keepdims=True) - lengths[order]).mean()
    assert padding < 5  # in batches as they fall it is over 150
    assert not np.array_equal(order, batch_order(lengths, 2, 16, seed=4))
    assert batch_order(lengths[:10], 3, 16, seed=0).shape == (1, 16)
    assert len(batch_order(lengths[:5], 3, 16, seed=0)) == 0


def test_padding_has_no_share_in_the_loss(tmp_path: Path) -> None:
    tokenizer = small_tokenizer()
    source = read_squad(write(tmp_path / "a.json", twenty_questions()), "--train-file")
    tokenised = tokenise(source, tokenizer, WindowSize(40, 12, 8), training=True)
    torch.manual_seed(0)
    model = BertForQuestionAnswering(bert_config(MODEL, len(tokenizer))).eval()
    short = int(tokenised.lengths.argmin())
    chosen = torch.tensor([short])
    tight, wide = (
        window_loss(model, tokenised.windows, chosen, width, bf16=False)
        for width in (int(tokenised.lengths[short]), 40)
    )
    assert tight.item() == pytest.approx(wide.item(), rel=1e-5)
    # By transformers' own loss, on the window alone.
    length = int(tokenised.lengths[short])
    windows = tokenised.windows
    own = model(
        input_ids=windows.input_ids[chosen, :length].long(),
        token_type_ids=(torch.arange(length) >= windows.text_starts[short]).long()[None],
        start_positions=windows.starts[chosen],
        end_positions=windows.ends[chosen],
    ).loss
    assert tight.item() == pytest.approx(own.item(), rel=1e-5)
    autocast = window_loss(model, windows, chosen, length, bf16=True)
    assert autocast.item() == pytest.approx(own.item(), rel=2e-2)
    assert autocast.item() != own.item()


def test_an_answer_that_is_nowhere_trains_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {"id": "1", "question": "?", "answers": [{"text": "Rome", "answer_start": 0}]}
    train = write(tmp_path / "wrong.json", squad({"context": "Ada lives in Rome .", "qas": [wrong]}))
    assert run(folder, tmp_path / "out", "--train-file", str(train)) == 2
    assert "none of 1 questions can be used" in capsys.readouterr().err
