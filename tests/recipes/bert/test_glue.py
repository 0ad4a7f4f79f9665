"""GLUE: its measures, and a task of its columns read through the same call as the hub's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import BertConfig, BertForPreTraining

from ds_vrgd_recipes.bert.glue import main, measures
from ds_vrgd_recipes.bert.vocabulary import count_characters, train_tokenizer
from tests.recipes.bert.cases import corpus_text


def test_measures_by_hand() -> None:
    labels = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    predicted = np.array([1, 1, 0, 1, 0, 0, 0, 0])
    # 2 true, 1 false positive, 1 false negative, 4 true negatives
    assert measures("sst2", predicted, labels) == {"accuracy": 0.75}
    assert measures("mrpc", predicted, labels) == pytest.approx({"accuracy": 0.75, "f1": 2 * 2 / (3 + 3)})
    matthews = (2 * 4 - 1 * 1) / (3 * 3 * 5 * 5) ** 0.5
    assert measures("cola", predicted, labels)["matthews_correlation"] == pytest.approx(matthews)
    assert measures("cola", np.zeros(8), labels) == {"matthews_correlation": 0.0}
    # Ranks with a tie: 1, 2.5, 2.5, 4 and 1, 2, 3, 4; their correlation is 4.5 / sqrt(4.5 * 5).
    scores = measures("stsb", np.array([0.0, 3.0, 3.0, 9.0]), np.array([1.0, 2.0, 4.0, 5.0]))
    assert scores["spearman"] == pytest.approx(4.5 / (4.5 * 5.0) ** 0.5)
    assert scores["pearson"] == pytest.approx(np.corrcoef([0, 3, 3, 9], [1, 2, 4, 5])[0, 1])


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that load_dataset reads as nyu-mll/glue, with mrpc alone; and a model."""
    folder = tmp_path_factory.mktemp("glue")
    data = folder / "data" / "mrpc"
    data.mkdir(parents=True)
    sentences = corpus_text().replace("\n\n", "\n").split("\n")
    rng = np.random.default_rng(0)
    for split, count in (("train", 64), ("validation", 16)):
        rows = []
        for _ in range(count):
            one, other = rng.choice(sentences, 2)
            label = int(rng.integers(2))
            rows.append({"sentence1": one, "sentence2": one if label else other, "label": label})
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "data" / "README.md").write_text("---\nconfigs:\n- {config_name: mrpc, data_dir: mrpc}\n---\n")
    tokenizer = train_tokenizer(count_characters(sentences), sentences, 256)
    tokenizer.save_pretrained(str(folder / "model"))
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    BertForPreTraining(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(str(folder / "model"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [[], ["--optimizer", "VRLAMB", "--micro-batch", "4"]], ids=["AdamW", "VRLAMB"])
def test_a_task(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    optimizer: list[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    arguments = ["--model", f"{stand_in}/model", "--data", f"{stand_in}/data", "--task", "mrpc", "--seeds", "1", "2"]
    arguments += ["--output", str(tmp_path / "out"), "--batch", "16", "--epochs", "1", *optimizer]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["results"]) == 2
    assert result["accuracy"] == np.median([each["accuracy"] for each in result["results"]])
    assert capsys.readouterr().out.endswith(f"mrpc: accuracy {result['accuracy']:.4f}, f1 {result['f1']:.4f}\n")
    assert main(arguments) == 2
    assert "is not empty; give another folder" in capsys.readouterr().err


def test_a_model_or_data_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "x", "--data", str(tmp_path / "absent"), "--task", "rte", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "absent" in capsys.readouterr().err
