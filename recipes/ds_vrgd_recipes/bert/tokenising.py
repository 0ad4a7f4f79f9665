"""The last stage: a part of the corpus becomes a shard of token ids, and its sequences of every length."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ds_vrgd_recipes.bert.duplicates import duplicates_of
from ds_vrgd_recipes.bert.sentences import cut_sentence, split_sentences
from ds_vrgd_recipes.bert.spool import read_summary, read_texts
from ds_vrgd_recipes.bert.store import Shard, ShardBuilder, Tokens, chunk_spans, write_chunks
from ds_vrgd_recipes.run.files import fingerprint, write_binary, write_text

SPLITS = ("train", "held_out")

_ENCODED_AT_ONCE = 1 << 18  # characters; the library needs some 100 bytes per token until the ids are copied


@dataclass
class PartResult:
    """The result of a part.

    Attributes:
        duplicates, duplicate_characters: paragraphs that occur in an earlier part.
        splits: numbers of documents, sentences and tokens by split.
        sequences: number of sequences by split and length.
        files: size and sha256 of each file written.
    """

    duplicates: int = 0
    duplicate_characters: int = 0
    cut_sentences: int = 0
    splits: dict[str, dict[str, int]] = field(default_factory=dict)
    sequences: dict[str, dict[str, int]] = field(default_factory=dict)
    files: dict[str, dict[str, int | str]] = field(default_factory=dict)


def documents_of_part(work: Path, number: int, ranges: int, result: PartResult | None = None) -> Iterator[list[str]]:
    """Yield each document's paragraphs that occur in no earlier part; the others are counted in ``result``."""
    duplicates = duplicates_of(work, number, ranges)
    position = 0
    for text in read_texts(work, number):
        paragraphs = []
        for paragraph in text.split("\n") if text else ():
            if position not in duplicates:
                paragraphs.append(paragraph)
            elif result is not None:
                result.duplicates += 1
                result.duplicate_characters += len(paragraph)
            position += 1
        yield paragraphs


def tokenise(
    number: int, *, work: Path, folder: Path, ranges: int, held_out_every: int, pieces: int, lengths: Sequence[int]
) -> PartResult:
    """Write the shards, sequences and unigram counts of a part; read only what an earlier run has completed.

    Args:
        work: has the earlier stages.
        folder: gets the shards.
        ranges: of hash values that were compared, see ``bert.duplicates``.
        pieces: size of the vocabulary.
        lengths: of sequences, in tokens.
    """
    done = _result_file(work, number)
    if done.exists():
        return PartResult(**json.loads(done.read_text(encoding="utf-8")))
    result = PartResult()
    builders = {split: ShardBuilder("uint16" if pieces <= 2**16 else "uint32") for split in SPLITS}
    counts = np.zeros(pieces, dtype=np.int64)
    first = read_summary(work, number).first_document
    documents = documents_of_part(work, number, ranges, result)
    for offset, sentences in enumerate(_tokenised(documents, _tokenizer(folder / "tokenizer"), result)):
        builders["held_out" if (first + offset) % held_out_every == 0 else "train"].add(sentences)
    for split, builder in builders.items():
        result.splits[split] = {
            "documents": builder.documents,
            "sentences": builder.sentences,
            "tokens": builder.tokens,
        }
        if not builder.documents:
            continue
        shard = builder.build()
        if split == "train":
            counts += np.bincount(shard.tokens, minlength=len(counts))
        name = shard_name(split, number)
        shard.write(folder / name)
        result.files[name] = fingerprint(folder / name)._asdict()
        result.sequences[split] = {}
        for length in lengths:
            sequences, files = cut(shard, folder, split, number, length)
            result.sequences[split][str(length)] = sequences
            result.files |= files
    counts_file = counts_name(work, number)
    counts_file.parent.mkdir(exist_ok=True)
    write_binary(counts_file, lambda file: np.save(file, counts))
    done.parent.mkdir(exist_ok=True)
    write_text(done, json.dumps(asdict(result)))  # last: it marks the part as complete
    return result


def cut(
    shard: Shard, folder: Path, split: str, number: int, length: int
) -> tuple[int, dict[str, dict[str, int | str]]]:
    """Write a shard's sequences of one length; return their number, and the file's fingerprint by its name."""
    name = chunks_name(split, number, length)
    spans = chunk_spans(shard, length)
    write_chunks(folder / name, spans)
    return len(spans), {name: fingerprint(folder / name)._asdict()}


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard within the prepared folder."""
    return f"{split}/{number:06d}.arrow"


def chunks_name(split: str, number: int, length: int) -> str:
    """Return the path of a shard's sequences within the prepared folder."""
    return f"sequences-{length}/{split}/{number:06d}.arrow"


def counts_name(work: Path, number: int) -> Path:
    """Return the file of the unigram counts of a part's training documents."""
    return work / "counts" / f"{number:06d}.npy"


def _result_file(work: Path, number: int) -> Path:
    return work / "results" / f"{number:06d}.json"


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenised(documents: Iterator[list[str]], tokenizer: Tokenizer, result: PartResult) -> Iterator[list[Tokens]]:
    """Yield the token ids of each sentence, document by document."""
    batch: list[list[str]] = []
    characters = 0
    for paragraphs in documents:
        sentences: list[str] = []
        for paragraph in paragraphs:
            for sentence in split_sentences(paragraph):
                pieces = cut_sentence(sentence)
                sentences.extend(pieces)
                result.cut_sentences += len(pieces) > 1
        batch.append(sentences)
        characters += sum(map(len, sentences))
        if characters >= _ENCODED_AT_ONCE:
            yield from _encoded(batch, tokenizer)
            batch, characters = [], 0
    yield from _encoded(batch, tokenizer)


def _encoded(documents: Sequence[list[str]], tokenizer: Tokenizer) -> Iterator[list[Tokens]]:
    flat = [sentence for sentences in documents for sentence in sentences]
    ids: list[Tokens] = []
    start = 0
    while start < len(flat):
        end, characters = start, 0
        while end < len(flat) and (end == start or characters + len(flat[end]) <= _ENCODED_AT_ONCE):
            characters += len(flat[end])
            end += 1
        encodings = tokenizer.encode_batch_fast(flat[start:end], add_special_tokens=False)
        ids.extend(np.array(encoding.ids, dtype=np.uint32) for encoding in encodings)
        start = end
    each = iter(ids)
    for sentences in documents:
        yield [next(each) for _ in sentences]
