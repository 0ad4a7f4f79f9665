"""Token files: what is written is what is read; chunks by hand; shards as one."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np

from ds_vrgd_recipes.bert.store import Chunks, Shard, ShardBuilder, Split, chunk_spans, open_chunks, write_chunks


def shard(documents: list[list[list[int]]]) -> Shard:
    builder = ShardBuilder("uint16")
    for document in documents:
        builder.add(document)
    return builder.build()


def test_round_trip_drops_empty_sentences_and_documents(tmp_path: Path) -> None:
    shard([[[1, 2], [], [3]], [[]], [[4, 5, 6]]]).write(tmp_path / "shard.arrow")
    read = Shard.open(tmp_path / "shard.arrow")
    assert read.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert read.tokens.dtype == np.uint16
    assert read.sentences.tolist() == [0, 2, 3, 6]
    assert read.documents.tolist() == [0, 2, 3]
    assert not read.tokens.flags.writeable  # mapped, not copied
    assert datasets.Dataset.from_file(str(tmp_path / "shard.arrow"))["sentences"][0] == [[1, 2], [3]]


def test_chunks_fill_the_sequence_with_at_least_two_sentences(tmp_path: Path) -> None:
    lengths = [
        [4, 4, 4, 4, 4],  # 4+4 < 10, closed at 12; the last two are a chunk of their own
        [20, 1, 9],  # closed at two sentences although one is enough; the one left over joins it
        [30],  # no pair in it
        [5, 5],
    ]
    spans = chunk_spans(shard([[list(range(n)) for n in document] for document in lengths]), sequence_length=13)
    # 10 tokens beside [CLS] and two [SEP]
    assert spans.tolist() == [[0, 3], [3, 5], [5, 8], [9, 11]]
    write_chunks(tmp_path / "chunks.arrow", spans)
    assert open_chunks(tmp_path / "chunks.arrow").tolist() == spans.tolist()


def test_no_pairs_at_all(tmp_path: Path) -> None:
    spans = chunk_spans(shard([[[1]], [[2]]]), 16)
    write_chunks(tmp_path / "chunks.arrow", spans)
    assert open_chunks(tmp_path / "chunks.arrow").shape == (0, 2)


def test_shards_are_numbered_through() -> None:
    """Two shards read as one shard of the same documents does; one in between has no chunk."""
    documents = [[[1, 2], [3], [4, 5, 6]], [[7]], [[8], [9]], [[10, 11], [12]]]
    cuts = [documents[:1], documents[1:2], documents[2:]]
    split, whole = Split([shard(part) for part in cuts]), Split([shard(documents)])
    assert split.sentences == whole.sentences == 8
    for sentence in range(8):
        assert split.document_of(sentence) == whole.document_of(sentence)
        for length in (1, 2, 3, 9):
            assert split.passage(sentence, length).tolist() == whole.passage(sentence, length).tolist()
    assert split.document_of(2) == (0, 3)
    assert split.passage(1, 2).tolist() == [3, 4, 5, 6]
    chunks = Chunks(split, [chunk_spans(each, 8) for each in split.shards])
    expected = chunk_spans(whole.shards[0], 8).tolist()
    assert [list(chunks[number]) for number in range(len(chunks))] == expected == [[0, 3], [4, 6], [6, 8]]
    assert [split.span(*chunks[number]).tolist() for number in range(3)] == [[1, 2, 3, 4, 5, 6], [8, 9], [10, 11, 12]]
