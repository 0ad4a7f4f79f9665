"""The bank of examples gives what the loader's packing gives; runs from it learn, and their rows are complete."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertTokenizerFast

from ds_vrgd_recipes.bert.examples import IGNORED_LABEL, Batch
from ds_vrgd_recipes.bert.packing import pack
from ds_vrgd_recipes.run.errors import TrainingFailed
from evidence import bert, bert_cloze
from evidence.bert_data import Bank, Material
from evidence.bert_report import tables

PIECES, LENGTH = 32, 16
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def padded(examples: int, seed: int, label: int | None = None) -> Batch:
    """Random examples of 3 to 16 tokens, one or two of them masked."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (examples, 1), generator=generator)
    ids = torch.randint(5, PIECES, (examples, LENGTH), generator=generator)
    labels = torch.full_like(ids, IGNORED_LABEL)
    for row, length in enumerate(lengths.flatten().tolist()):
        places = torch.randperm(length, generator=generator)[: 1 + row % 2]
        labels[row, places] = ids[row, places] if label is None else label
    return {
        "input_ids": ids,
        "token_type_ids": (ids > PIECES // 2).long(),
        "attention_mask": (torch.arange(LENGTH) < lengths).long(),
        "labels": labels,
        "next_sentence_label": torch.arange(examples) % 2,
    }


def test_a_micro_batch_is_what_packing_makes_of_its_examples() -> None:
    first, second = padded(5, seed=0), padded(4, seed=1)
    order = torch.tensor([7, 0, 3, 8, 2, 5])
    bank = Bank.of([pack(first), pack(second)], torch.device("cpu")).ordered(order)
    rows = {name: torch.cat([first[name], second[name]]) for name in first}
    for begin, count in ((0, 6), (0, 2), (1, 3), (5, 1)):
        chosen = order[begin : begin + count]
        expected = pack({name: tensor[chosen] for name, tensor in rows.items()})
        found = bank.micro_batch(begin, count)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


@pytest.fixture(scope="module")
def data() -> Material:
    """Every masked token is 7: who learns that has a loss of 0, who ignores it one of log 32."""
    bank = Bank.of([pack(padded(64, seed, label=7)) for seed in range(8)], torch.device("cpu"))
    return Material(bank, [pack(padded(16, 99, label=7))], entropy=3.4657, pieces=PIECES)


def run(setting: bert.Setting, data: Material) -> dict[str, Any]:
    torch.manual_seed(setting.seed)
    return bert.train(setting, bert.network(setting, data), data)


@pytest.mark.parametrize(("optimizer", "rate"), [("VRLAMB", 2e-2), ("LAMB", 2e-2), ("VRAdamW", 1e-2), ("AdamW", 1e-2)])
def test_a_run_learns_and_its_row_is_complete(data: Material, optimizer: str, rate: float) -> None:
    row = run(bert.Setting("toy", "speeches", LENGTH, 512, 32, 4, optimizer, rate, seed=0), data)
    assert row["updates"] == 512 // 32
    assert [one[0] for one in row["evaluations"]] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert row["final"] == row["evaluations"][-1][1] < 2.0
    assert all((ratio is not None) == optimizer.startswith("VR") for *_, ratio in row["evaluations"])


def test_the_same_seed_is_the_same_run(data: Material) -> None:
    setting = bert.Setting("toy", "speeches", LENGTH, 64, 32, 4, "VRLAMB", 2e-2, seed=0)
    row = run(setting, data)
    assert run(setting, data) == row
    assert run(dataclasses.replace(setting, seed=1), data)["final"] != row["final"]


def test_the_table_takes_each_optimizers_best_rate_and_a_ruined_run_is_worse_than_any() -> None:
    def row(optimizer: str, rate: float, seed: int, final: float) -> dict[str, Any]:
        evaluations = [[8, 7.0], [16, final]]
        return {"model": "mini", "text": "speeches", "examples": 32, "batch": 2, "micro_batch": 1,
                "optimizer": optimizer, "rate": rate, "seed": seed, "final": final, "evaluations": evaluations,
                "entropy": 6.5, "updates": 16}  # fmt: skip

    rows = [row("LAMB", 1.0, seed, loss) for seed, loss in enumerate((6.0, 6.2, 6.1))]
    rows += [row("LAMB", 2.0, seed, loss) for seed, loss in enumerate((5.0, float("nan"), float("nan")))]
    rows += [row("VRLAMB", 2.0, 0, 6.6)]
    text = "\n".join(tables(rows))
    # All reach 6.6, LAMB's median run at 8 + 8 (7 - 6.6) / (7 - 6.1) updates.
    assert "| 2 | LAMB | 2 | 16 | 1 | 6.100 (6.000–6.200) | 3 | 16 | 12 (6.600) |  | 1: 6.100; 2: inf |" in text
    assert "| 2 | VRLAMB | 2 | 16 | 2 | 6.600 | 1 | never | 16 (6.600) |  | 2: 6.600 |" in text


def test_fine_tuning_starts_from_the_run_s_weights_and_scores_its_answers(tmp_path: Path) -> None:
    """Every answer is the passage's first word, which two updates an epoch suffice to learn."""
    words = ["alpha", "beta", "gamma", "delta"]
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate([*SPECIAL, "who", *words])})

    def file(name: str, count: int) -> Path:
        passages = [" ".join(words[(row + place) % 4] for place in range(3)) for row in range(count)]
        asked = [{"id": f"{name}{row}", "question": "who", "answers": [{"text": passage.split()[0], "answer_start": 0}]}
                 for row, passage in enumerate(passages)]  # fmt: skip
        data = [{"title": name, "paragraphs": [{"context": passage, "qas": [one]}]}
                for passage, one in zip(passages, asked, strict=True)]  # fmt: skip
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"version": "1.1", "data": data}))
        return path

    settings = bert_cloze.SETTINGS.model_copy(
        update={"train_file": file("train", 64), "predict_file": file("dev", 8), "batch_size": 16, "epochs": 12,
                "max_length": LENGTH, "doc_stride": 4, "max_question_length": 4, "lr": 2e-3}
    )  # fmt: skip
    setting = bert.Setting("toy", "speeches", LENGTH, 0, 32, 4, "none", 0.0, seed=0)
    torch.manual_seed(0)
    network = bert.network(setting, Material(None, [], 0.0, len(tokenizer))).network  # type: ignore[arg-type]
    row = bert_cloze.fine_tuned(network.config, network.state_dict(), tokenizer, 0, settings)
    assert row == {"cloze_f1": 100.0, "cloze_exact_match": 100.0}
    ruined = {name: torch.full_like(tensor, torch.nan) for name, tensor in network.state_dict().items()}
    with pytest.raises(TrainingFailed):
        bert_cloze.fine_tuned(network.config, ruined, tokenizer, 0, settings)


def test_the_full_sweep_has_every_batch_and_never_fewer_than_16_chunks() -> None:
    settings = [one for one in bert.settings("full") if one.model == "mini" and one.optimizer != "none"]
    assert min(one.batch // one.micro_batch for one in settings) == 16
    assert all(one.examples % one.batch == one.batch % one.micro_batch == 0 for one in settings)
    tried = Counter((one.batch, one.optimizer) for one in settings if one.examples == bert.EXAMPLES)
    assert set(tried.values()) == {2}
    assert tried.keys() == set(product((1024, 2048, 4096, 8192, 16384, 32768), (*bert.TWINS, *bert.TWINS.values())))


def test_a_batch_is_tuned_on_and_then_seeded() -> None:
    def row(optimizer: str, rate: float, final: float, examples: int = bert.EXAMPLES) -> dict[str, Any]:
        return {"optimizer": optimizer, "batch": 2048, "rate": rate, "seed": 0, "final": final, "examples": examples}

    measured = [row("LAMB", 1e-2, 6.1), row("LAMB", 5e-3, 6.3), row("LAMB", 2e-2, math.nan), row("LAMB", 4e-2, 5.0, 8)]
    measured += [row("VRAdamW", 1e-3, 6.5), row("VRAdamW", 5e-4, 6.4), row("AdamW", 1e-3, 6.4)]
    called = [(one.optimizer, one.rate, one.seed) for one in bert.follow_up("full", measured)]
    assert called == [("LAMB", 1e-2, 1), ("LAMB", 1e-2, 2), ("VRAdamW", 2.5e-4, 0)]
    assert bert.follow_up("small", measured) == []
    # The seeds at a twin's best rate are its base's, too, once each.
    measured += [row("VRLAMB", 1e-2, 6.2), row("VRLAMB", 5e-3, 6.3), row("VRLAMB", 2e-2, 6.0), row("VRLAMB", 4e-2, 6.9)]
    called = [(one.optimizer, one.rate, one.seed) for one in bert.follow_up("full", measured)]
    at_twins = [(name, 2e-2, seed) for seed in (1, 2) for name in ("VRLAMB", "LAMB")]
    assert called == [("LAMB", 1e-2, 1), ("LAMB", 1e-2, 2), ("VRAdamW", 2.5e-4, 0), *at_twins]
