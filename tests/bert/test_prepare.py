"""From corpus to prepared data, and that a refused corpus leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.prepare import PreparedData, open_prepared, prepare
from ds_vrgd.bert.runfile import RunFile
from ds_vrgd.bert.vocabulary import load_tokenizer
from tests.bert.cases import corpus_text, run_settings


def silent(text: str) -> None:
    """No report."""


def test_every_fifth_document_is_held_out(data: PreparedData) -> None:
    assert len(data.train.documents) - 1 == 48
    assert len(data.held_out.documents) - 1 == 12
    first = corpus_text().split("\n\n")[0]
    begin, end = data.held_out.documents[:2]
    assert data.tokenizer.decode(data.held_out.span(begin, end)) == data.tokenizer.decode(
        data.tokenizer(first, add_special_tokens=False).input_ids
    )


def test_unigram_counts_are_those_of_the_training_tokens(data: PreparedData) -> None:
    counts = np.bincount(data.train.tokens, minlength=len(data.tokenizer))
    assert data.unigram_counts.tolist() == counts.tolist()


def test_prepared_data_is_reused_and_other_lengths_are_added(data_folder: Path, run: RunFile) -> None:
    tokens = data_folder / "train" / "tokens.bin"
    before = tokens.stat().st_mtime_ns
    phase = run.phases[0].model_copy(update={"sequence_length": 40})
    longer = run.model_copy(update={"phases": [phase]})
    prepare(longer, data_folder, silent)
    assert tokens.stat().st_mtime_ns == before
    assert set(open_prepared(longer, data_folder).spans) == {("train", 40), ("held_out", 40)}


def test_data_of_another_corpus_is_refused(data_folder: Path, run: RunFile) -> None:
    with pytest.raises(InputError, match=r"held_out_every=7 in the run file, but .* was prepared with 5"):
        prepare(run.model_copy(update={"held_out_every": 7}), data_folder, silent)
    with pytest.raises(InputError, match="holds no prepared data"):
        prepare(run, data_folder.parent, silent)
    with pytest.raises(InputError, match="not visible to every rank"):
        open_prepared(run, data_folder / "absent")


def test_a_saved_vocabulary_is_taken_as_it_is(corpus_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    settings = run_settings(corpus_folder, vocabulary={"folder": str(data_folder / "tokenizer")})
    prepare(RunFile.model_validate(settings), tmp_path / "data", silent)
    ours = json.loads((tmp_path / "data" / "manifest.json").read_text(encoding="utf-8"))
    theirs = json.loads((data_folder / "manifest.json").read_text(encoding="utf-8"))
    assert ours["vocabulary_sha256"] == theirs["vocabulary_sha256"]
    assert (
        load_tokenizer(tmp_path / "data" / "tokenizer").get_vocab()
        == load_tokenizer(data_folder / "tokenizer").get_vocab()
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\n \n\n", r"corpus: folder holds no document"),
        ("One. Two.\n\nThree. Four.", r"gives 2 documents, of which held_out_every=5 leaves 1 .* and 1 held out"),
        ("\n\n".join(f"only sentence {i}." for i in range(20)), r"no two sentences in a row"),
    ],
)
def test_unusable_corpora_leave_nothing_behind(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text(text, encoding="utf-8")
    run = RunFile.model_validate(run_settings(tmp_path / "corpus"))
    with pytest.raises(InputError, match=expected):
        prepare(run, tmp_path / "out" / "data", silent)
    assert not (tmp_path / "out").exists()


def test_the_rest_of_an_interrupted_preparation_is_replaced(tmp_path: Path, run: RunFile) -> None:
    (tmp_path / "data.partial" / "train").mkdir(parents=True)
    (tmp_path / "data.partial" / "train" / "tokens.bin").write_bytes(b"half")
    prepare(run, tmp_path / "data", silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
