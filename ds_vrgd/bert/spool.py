"""The first stage: the corpus is read once and laid aside as numbered parts of even size, on which processes work.

Nothing after this stage depends on how the text came, and what is slow works on many parts at once. A part is whole or
is not there, so a preparation that was killed reads the corpus again and writes only the parts that are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ds_vrgd.bert.duplicates import paragraph_hash, write_hashes
from ds_vrgd.training.errors import InputError
from ds_vrgd.training.files import write_binary

PART_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class PartSummary:
    """What is in a part, and what was left out of it.

    Attributes:
        characters: of the text as it was read.
        sha256: of that text.
        hashed: paragraphs whose hash was laid aside, see ``ds_vrgd.bert.duplicates``.
        duplicates, duplicate_characters: paragraphs that stand earlier in the same part.
    """

    first_document: int
    documents: int
    characters: int
    sha256: str
    hashed: int
    duplicates: int
    duplicate_characters: int


@dataclass(frozen=True)
class RawPart:
    """Documents as they were read, and where and how to lay them aside."""

    number: int
    first_document: int
    texts: list[str]
    work: Path
    deduplicate_from: int


def parts(documents: Iterable[str], work: Path, deduplicate_from: int, characters: int) -> Iterator[RawPart]:
    """Consecutive documents of at least ``characters`` characters together; the last part may have fewer."""
    texts: list[str] = []
    number = size = first = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= characters:
            yield RawPart(number, first, texts, work, deduplicate_from)
            number, first, texts, size = number + 1, first + len(texts), [], 0
    if texts:
        yield RawPart(number, first, texts, work, deduplicate_from)


def lay_aside(part: RawPart) -> PartSummary:
    """Write a part, without the paragraphs that it repeats, and the hashes of its paragraphs.

    Where an earlier run has written the part, only compare.

    Raises:
        InputError: the earlier run read another text.
    """
    path = _path(part.work, part.number)
    digest = hashlib.sha256()
    for text in part.texts:
        digest.update(text.encode())
        digest.update(b"\0")
    if path.exists():
        summary = read_summary(part.work, part.number)
        if summary.sha256 != digest.hexdigest():
            raise InputError(
                f"corpus: documents {summary.first_document:,} to {summary.first_document + summary.documents:,} are "
                "not those that the preparation began with, so it cannot go on; it starts anew when you start it again"
            )
        return summary
    texts: list[str] = []
    hashes: dict[bytes, int] = {}
    position = duplicates = duplicate_characters = 0
    for text in part.texts:
        kept = []
        for line in text.splitlines():
            paragraph = line.strip()
            if not paragraph:
                continue
            if len(paragraph) >= part.deduplicate_from:
                key = paragraph_hash(paragraph)
                if key in hashes:
                    duplicates += 1
                    duplicate_characters += len(paragraph)
                    continue
                hashes[key] = position
            kept.append(paragraph)
            position += 1
        texts.append("\n".join(kept))
    summary = PartSummary(
        first_document=part.first_document,
        documents=len(texts),
        characters=sum(map(len, part.texts)),
        sha256=digest.hexdigest(),
        hashed=len(hashes),
        duplicates=duplicates,
        duplicate_characters=duplicate_characters,
    )
    write_hashes(part.work, part.number, hashes)
    batch = pa.record_batch(
        {"text": pa.array(texts, pa.large_string())}, metadata={"summary": json.dumps(asdict(summary))}
    )
    path.parent.mkdir(exist_ok=True)
    options = pa.ipc.IpcWriteOptions(compression="lz4")

    def write(file: Any) -> None:
        with pa.ipc.new_stream(file, batch.schema, options=options) as stream:
            stream.write_batch(batch)

    write_binary(path, write)
    return summary


def read_texts(work: Path, number: int) -> list[str]:
    """Documents of a part, as lines that are paragraphs; "" where all were repetitions."""
    with pa.memory_map(str(_path(work, number))) as file:
        texts: list[str] = pa.ipc.open_stream(file).read_next_batch().column("text").to_pylist()
    return texts


def read_summary(work: Path, number: int) -> PartSummary:
    """What ``lay_aside`` returned for a part."""
    with pa.memory_map(str(_path(work, number))) as file:
        return PartSummary(**json.loads(pa.ipc.open_stream(file).schema.metadata[b"summary"]))


def _path(work: Path, number: int) -> Path:
    return work / "parts" / f"{number:06d}.arrow"
