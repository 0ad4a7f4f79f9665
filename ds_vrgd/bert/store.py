"""Token storage: a corpus split as three flat files that every rank maps into memory.

``tokens.bin`` holds all token ids; ``sentences.bin`` the offset of each sentence in it, ``documents.bin`` the index
of each document's first sentence, both int64 with the total as a last entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt


class SplitWriter:
    """Appends documents to a split on disk; memory use does not grow with the corpus."""

    def __init__(self, folder: Path, dtype: str) -> None:
        folder.mkdir(parents=True)
        self._dtype = np.dtype(dtype)
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in ("tokens", "sentences", "documents")}
        self.tokens = self.sentences = self.documents = 0

    def add(self, sentences: Sequence[Sequence[int]]) -> None:
        """Append one document: its sentences as token ids. Empty sentences, and documents of none, are dropped."""
        kept = [sentence for sentence in sentences if len(sentence)]
        if not kept:
            return
        lengths = np.array([len(sentence) for sentence in kept])
        starts = self.tokens + np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._append("tokens", np.concatenate(kept).astype(self._dtype))
        self._append("sentences", starts.astype(np.int64))
        self._append("documents", np.array([self.sentences], dtype=np.int64))
        self.tokens += int(lengths.sum())
        self.sentences += len(kept)
        self.documents += 1

    def _append(self, name: str, values: npt.NDArray[np.generic]) -> None:
        self._files[name].write(values.tobytes())

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._append("sentences", np.array([self.tokens], dtype=np.int64))
        self._append("documents", np.array([self.sentences], dtype=np.int64))
        for file in self._files.values():
            file.close()


@dataclass(frozen=True)
class Split:
    """Training or held-out documents, mapped from disk.

    Attributes:
        tokens: token ids of all sentences, [tokens].
        sentences: offset of each sentence in ``tokens``, and the total, [sentences + 1].
        documents: first sentence of each document, and the total, [documents + 1].
    """

    tokens: npt.NDArray[np.unsignedinteger]
    sentences: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @classmethod
    def open(cls, folder: Path, dtype: str) -> Split:
        """Map the files that a SplitWriter left in ``folder``."""
        return cls(
            tokens=np.memmap(folder / "tokens.bin", dtype=np.dtype(dtype), mode="r"),
            sentences=np.memmap(folder / "sentences.bin", dtype=np.int64, mode="r"),
            documents=np.memmap(folder / "documents.bin", dtype=np.int64, mode="r"),
        )

    def span(self, first: int, last: int) -> npt.NDArray[np.unsignedinteger]:
        """Token ids of the sentences [first, last)."""
        return self.tokens[self.sentences[first] : self.sentences[last]]


def chunk_spans(split: Split, sequence_length: int) -> npt.NDArray[np.int64]:
    """Cut documents into runs of whole sentences that fill one sequence, [chunks, 2] as [first, last) sentence.

    As in BERT's data preparation a run is closed once it reaches ``sequence_length - 3`` tokens ([CLS] and two
    [SEP]), so it may be longer than the sequence: pairs are truncated. Unlike there, a run has at least two
    sentences, so that each one can give a true next-sentence pair. A single sentence left at a document's end joins
    the run before it; a document of one sentence gives none.
    """
    target = sequence_length - 3
    spans = array("q")  # flat, first and last in turn: a large corpus has tens of millions of chunks
    for document in range(len(split.documents) - 1):
        begin, end = int(split.documents[document]), int(split.documents[document + 1])
        offsets = split.sentences[begin : end + 1].tolist()
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
    return np.array(spans, dtype=np.int64).reshape(-1, 2)
