"""Token files: what is written is what is read; chunks by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ds_vrgd.bert.store import Split, SplitWriter, chunk_spans


def write(folder: Path, documents: list[list[list[int]]]) -> Split:
    with SplitWriter(folder, "uint16") as writer:
        for document in documents:
            writer.add(document)
    return Split.open(folder, "uint16")


def test_round_trip_drops_empty_sentences_and_documents(tmp_path: Path) -> None:
    split = write(tmp_path / "split", [[[1, 2], [], [3]], [[]], [[4, 5, 6]]])
    assert split.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert split.sentences.tolist() == [0, 2, 3, 6]
    assert split.documents.tolist() == [0, 2, 3]
    assert split.span(1, 3).tolist() == [3, 4, 5, 6]


def test_chunks_fill_the_sequence_with_at_least_two_sentences(tmp_path: Path) -> None:
    lengths = [
        [4, 4, 4, 4, 4],  # 4+4 < 10, closed at 12; the last two are a chunk of their own
        [20, 1, 9],  # closed at two sentences although one is enough; the one left over joins it
        [30],  # no pair in it
        [5, 5],
    ]
    split = write(tmp_path / "split", [[list(range(n)) for n in document] for document in lengths])
    spans = chunk_spans(split, sequence_length=13)  # 10 tokens beside [CLS] and two [SEP]
    assert spans.tolist() == [[0, 3], [3, 5], [5, 8], [9, 11]]


def test_no_pairs_at_all(tmp_path: Path) -> None:
    split = write(tmp_path / "split", [[[1]], [[2]]])
    assert chunk_spans(split, 16).shape == (0, 2)
    assert chunk_spans(split, 16).dtype == np.int64
