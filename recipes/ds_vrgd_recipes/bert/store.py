"""Token storage: each split is a sequence of Arrow shards that every rank maps into memory.

A shard is an Arrow stream (``datasets.Dataset.from_file`` opens it, too) of one record batch: a row is a document, its
column ``sentences`` a list of lists of token ids. For each sequence length another Arrow stream has the runs of
sentences that fill a sequence: [first, last) in the column ``sentences``, counted within the shard.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ds_vrgd_recipes.run.files import write_binary

Tokens = npt.NDArray[np.unsignedinteger]
Offsets = npt.NDArray[np.int32]


class ShardBuilder:
    """Collects the documents of one shard."""

    def __init__(self, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._tokens: list[Tokens] = []
        self._sentences = array("i", [0])
        self._documents = array("i", [0])

    def add(self, sentences: Sequence[npt.ArrayLike]) -> None:
        """Append one document: its sentences as token ids. Empty sentences, and documents of none, are dropped."""
        kept = [ids for sentence in sentences if (ids := np.asarray(sentence, dtype=self._dtype)).size]
        if not kept:
            return
        self._tokens.extend(kept)
        for sentence in kept:
            self._sentences.append(self._sentences[-1] + len(sentence))
        self._documents.append(len(self._sentences) - 1)

    @property
    def documents(self) -> int:
        """The documents so far."""
        return len(self._documents) - 1

    @property
    def sentences(self) -> int:
        """The sentences so far."""
        return len(self._sentences) - 1

    @property
    def tokens(self) -> int:
        """The tokens so far."""
        return self._sentences[-1]

    def build(self) -> Shard:
        """Return the shard as it will be read."""
        tokens = np.concatenate(self._tokens) if self._tokens else np.array([], dtype=self._dtype)
        return Shard(tokens, np.array(self._sentences, dtype=np.int32), np.array(self._documents, dtype=np.int32))


@dataclass(frozen=True)
class Shard:
    """Documents of one file.

    Attributes:
        tokens: token ids of all sentences, [tokens].
        sentences: offset of each sentence in ``tokens``, and the total, [sentences + 1].
        documents: first sentence of each document, and the total, [documents + 1].
    """

    tokens: Tokens
    sentences: Offsets
    documents: Offsets

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        sentences = pa.ListArray.from_arrays(pa.array(self.sentences), pa.array(self.tokens))
        _write_arrow(path, {"sentences": pa.ListArray.from_arrays(pa.array(self.documents), sentences)})

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Map the file."""
        documents = _map_arrow(path).column("sentences")
        sentences = documents.values
        return cls(
            tokens=sentences.values.to_numpy(),
            sentences=sentences.offsets.to_numpy(),
            documents=documents.offsets.to_numpy(),
        )


class Split:
    """Training or held-out documents: all shards, with sentences numbered throughout.

    Attributes:
        sentences: their number.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = shards
        self._first = np.cumsum([0, *(len(shard.sentences) - 1 for shard in shards)]).tolist()
        self.sentences: int = self._first[-1]

    def span(self, first: int, last: int) -> Tokens:
        """Return the token ids of the sentences [first, last), all of one document."""
        shard, base = self._locate(first)
        return shard.tokens[shard.sentences[first - base] : shard.sentences[last - base]]

    def document_of(self, sentence: int) -> tuple[int, int]:
        """Return the sentences [first, last) of the document that ``sentence`` is part of."""
        shard, base = self._locate(sentence)
        number = int(np.searchsorted(shard.documents, sentence - base, side="right"))
        return int(shard.documents[number - 1]) + base, int(shard.documents[number]) + base

    def passage(self, sentence: int, length: int) -> Tokens:
        """Return whole sentences from ``sentence`` on, at least ``length`` tokens where the document has them."""
        shard, base = self._locate(sentence)
        _, end = self.document_of(sentence)
        start = sentence - base
        offsets = shard.sentences[start + 1 : end - base + 1]
        enough = int(np.searchsorted(offsets, shard.sentences[start] + length))
        return self.span(sentence, min(sentence + 1 + enough, end))

    def first_sentence(self, shard: int) -> int:
        """Return the number of the shard's first sentence."""
        first: int = self._first[shard]
        return first

    def _locate(self, sentence: int) -> tuple[Shard, int]:
        number = bisect_right(self._first, sentence) - 1
        return self.shards[number], self._first[number]


class Chunks:
    """The runs of sentences of a split that fill a sequence, by number."""

    def __init__(self, split: Split, shards: Sequence[npt.NDArray[np.uint32]]) -> None:
        self._shards = shards
        self._bases = [split.first_sentence(number) for number in range(len(shards))]
        self._first = np.cumsum([0, *map(len, shards)]).tolist()

    def __len__(self) -> int:
        total: int = self._first[-1]
        return total

    def __getitem__(self, chunk: int) -> tuple[int, int]:
        """Return the sentences [first, last) of the chunk, numbered within the split."""
        number = bisect_right(self._first, chunk) - 1
        first, last = self._shards[number][chunk - self._first[number]].tolist()
        return first + self._bases[number], last + self._bases[number]


def write_chunks(path: Path, spans: npt.NDArray[np.uint32]) -> None:
    """Write the result of ``chunk_spans`` for one shard, whole or not at all."""
    _write_arrow(path, {"sentences": pa.FixedSizeListArray.from_arrays(pa.array(spans.reshape(-1)), 2)})


def open_chunks(path: Path) -> npt.NDArray[np.uint32]:
    """Map the file of ``write_chunks``, [chunks, 2]."""
    spans: npt.NDArray[np.uint32] = _map_arrow(path).column("sentences").values.to_numpy().reshape(-1, 2)
    return spans


def chunk_spans(shard: Shard, sequence_length: int) -> npt.NDArray[np.uint32]:
    """Cut documents into runs of whole sentences that fill one sequence, [chunks, 2] as [first, last) sentence.

    As in BERT's data preparation a run is closed once it reaches ``sequence_length - 3`` tokens ([CLS] and two
    [SEP]), so it may be longer than the sequence: pairs are truncated. Unlike there, a run has at least two
    sentences, so that each one can give a true next-sentence pair. A single sentence left at a document's end joins
    the run before it; a document of one sentence gives none.
    """
    target = sequence_length - 3
    spans = array("I")  # flat, first and last in turn
    bounds = shard.documents.tolist()
    for begin, end in pairwise(bounds):
        offsets = shard.sentences[begin : end + 1].tolist()
        first, runs = 0, len(spans)
        for last in range(2, end - begin + 1):
            if last - first >= 2 and offsets[last] - offsets[first] >= target:
                spans.extend((begin + first, begin + last))
                first = last
        left = end - begin - first
        if left >= 2:
            spans.extend((begin + first, end))
        elif left == 1 and len(spans) > runs:
            spans[-1] = end
    return np.array(spans, dtype=np.uint32).reshape(-1, 2)


def _write_arrow(path: Path, columns: dict[str, Any]) -> None:
    batch = pa.record_batch(columns)

    def write(file: Any) -> None:
        with pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_binary(path, write)


def _map_arrow(path: Path) -> Any:
    """Return the one record batch of a file; the arrays are views of the mapped file, which itself is closed again."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_next_batch()
