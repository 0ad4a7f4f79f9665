"""The first stage: the corpus is read once and copied into numbered parts of even size, on which processes work.

Nothing after this stage depends on the form of the corpus, and slow stages work on many parts at once. A part is whole
or missing, so a preparation that was killed reads the corpus again and writes only the missing parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from ds_vrgd_recipes.bert.duplicates import paragraph_hash, write_hashes
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import write_binary

PART_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class PartSummary:
    """The content of a part, and what was left out of it.

    Attributes:
        characters, sha256: of the text as it was read.
        hashed: paragraphs whose hash was stored, see ``bert.duplicates``.
        duplicates, duplicate_characters: paragraphs that occur earlier in the same part.
    """

    first_document: int
    documents: int
    characters: int
    sha256: str
    hashed: int
    duplicates: int
    duplicate_characters: int


#: Number of a part, number of its first document, and its documents as they were read.
RawPart = tuple[int, int, list[str]]


def parts(documents: Iterable[str], characters: int) -> Iterator[RawPart]:
    """Yield consecutive documents of at least ``characters`` characters together; the last part may have fewer."""
    texts: list[str] = []
    number = size = first = 0
    for text in documents:
        texts.append(text)
        size += len(text)
        if size >= characters:
            yield number, first, texts
            number, first, texts, size = number + 1, first + len(texts), [], 0
    if texts:
        yield number, first, texts


def store_part(work: Path, deduplicate_from: int, part: RawPart) -> PartSummary:
    """Write a part without the paragraphs that it repeats, and the hashes of its paragraphs.

    A part that an earlier run has written is only compared.

    Raises:
        InputError: the earlier run read another text.
    """
    number, first_document, read = part
    path = _path(work, number)
    digest = hashlib.sha256()
    for text in read:
        digest.update(text.encode())
        digest.update(b"\0")
    if path.exists():
        summary = read_summary(work, number)
        if summary.sha256 != digest.hexdigest():
            raise InputError(
                f"corpus: documents {summary.first_document:,} to {summary.first_document + summary.documents:,} are "
                "not those that the preparation began with, so it cannot resume; it begins anew when you start it again"
            )
        return summary
    texts: list[str] = []
    hashes: dict[bytes, int] = {}
    position = duplicates = duplicate_characters = 0
    for text in read:
        kept = []
        for line in text.splitlines():
            paragraph = line.strip()
            if not paragraph:
                continue
            if len(paragraph) >= deduplicate_from:
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
        first_document=first_document,
        documents=len(texts),
        characters=sum(map(len, read)),
        sha256=digest.hexdigest(),
        hashed=len(hashes),
        duplicates=duplicates,
        duplicate_characters=duplicate_characters,
    )
    write_hashes(work, number, hashes)
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
    """Return the documents of a part, a paragraph per line; "" where all were repetitions."""
    with pa.memory_map(str(_path(work, number))) as file:
        texts: list[str] = pa.ipc.open_stream(file).read_next_batch().column("text").to_pylist()
    return texts


def read_summary(work: Path, number: int) -> PartSummary:
    """Return what ``store_part`` returned for a part."""
    with pa.memory_map(str(_path(work, number))) as file:
        return PartSummary(**json.loads(pa.ipc.open_stream(file).schema.metadata[b"summary"]))


def _path(work: Path, number: int) -> Path:
    return work / "parts" / f"{number:06d}.arrow"
