"""Documents of one file: lines of text or JSON, and the tables that ``datasets`` reads; a path, or an URL of fsspec."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import escape
from typing import Any

import fsspec
from fsspec.core import url_to_fs

from ds_vrgd_recipes.run.errors import InputError

_LONGEST_LINE = 1 << 28  # bytes

_UTF8 = "convert the file, for example with iconv -f latin1 -t utf-8"


@dataclass
class Skipped:
    """Counts of what was read and left out, or cut."""

    empty_documents: int = 0
    empty_files: int = 0
    cut_documents: int = 0


def text_files(path: str) -> list[str]:
    """Return the files to read at ``path``, a file or a folder, sorted by the parts of their names.

    Raises:
        InputError: there is none.
    """
    try:
        files, root = url_to_fs(path)
        if files.isfile(root):
            found = [root]
        elif files.isdir(root):
            found = sorted(files.find(root), key=lambda name: str(name).split("/"))
        else:
            raise InputError(f"corpus.path={path} is not a folder; give a folder of UTF-8 text files, or one file")
    except (ImportError, OSError, ValueError) as error:  # of an URL: no such protocol, no network, no credentials
        raise InputError(f"corpus.path={path} cannot be read ({error})") from error
    readable = [files.unstrip_protocol(name) if "://" in path else name for name in found if _reader(name) is not None]
    if not readable:
        raise InputError(f"corpus.path={path} holds no file that can be read ({KINDS}); put the text there as UTF-8")
    return readable


def size_and_version(path: str) -> tuple[int, str]:
    """Return the bytes of a file, and a text that changes with its content: with its times, or with a store's tag."""
    files, name = url_to_fs(path)
    files.invalidate_cache(name)
    return int(files.size(name)), files.ukey(name)


def file_documents(path: str, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    """Yield the documents of one file.

    Args:
        text_column: of files that are made of rows.
        largest: a block of a plain text file ends before it has more characters, even without a blank line.
        skipped: counts such ends.

    Raises:
        InputError: the file is damaged, not UTF-8, or has no such column; the message names the file and the line.
    """
    reader = _reader(path)
    assert reader is not None  # one of text_files
    try:
        yield from reader(path, text_column, largest, skipped)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"corpus.path: {path} cannot be read ({error}); repair or remove it") from error
    except Exception as error:  # whatever the reader of that format raises
        raise InputError(
            f"corpus.path: {path} is damaged or cut off ({type(error).__name__}: {error}); make or download it again"
        ) from error


def _blocks(path: str, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    """Yield the blocks of lines between blank lines."""
    block: list[str] = []
    characters = 0
    for _, line in _lines(path):
        line = line.strip()
        is_full = bool(line and block) and characters + len(line) > largest
        if block and (is_full or not line):
            skipped.cut_documents += is_full
            yield "\n".join(block)
            block, characters = [], 0
        if line:
            block.append(line)
            characters += len(line) + 1
    if block:
        yield "\n".join(block)


def _json_lines(path: str, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(
                f"corpus.path: {path} line {number} is not JSON ({error}); repair or remove that line"
            ) from error
        if not isinstance(row, dict):
            raise InputError(
                f"corpus.path: {path} line {number} is no JSON object; write each document as "
                f'{{"{text_column}": "..."}}'
            )
        yield _text(row, text_column, f"{path} line {number}")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield numbered lines, decompressed by the ending of the name, and decoded."""
    number = 0
    with fsspec.open(path, "rb", compression="infer") as compressed, io.BufferedReader(compressed, 1 << 20) as file:
        while raw := file.readline(_LONGEST_LINE):
            number += 1
            if len(raw) == _LONGEST_LINE and not raw.endswith(b"\n"):
                raise InputError(
                    f"corpus.path: {path} line {number} is longer than {_LONGEST_LINE >> 20} MiB; put line breaks in it"
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"corpus.path: {path} line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}); {_UTF8}"
                ) from error
            if b"\0" in raw:
                raise InputError(f"corpus.path: {path} line {number} holds a zero byte, as UTF-16 does; {_UTF8}")
            yield number, line


def _rows(kind: str, path: str, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    import datasets  # costs a second to import; most runs do not need it

    rows = datasets.load_dataset(kind, data_files=[escape(path)], split="train", streaming=True)
    for number, row in enumerate(rows, start=1):
        yield _text(row, text_column, f"{path} row {number}")


def _text(row: dict[str, Any], text_column: str, place: str) -> str:
    text = row.get(text_column, False)
    if text is not None and not isinstance(text, str):
        raise InputError(
            f"corpus.text_column={text_column} is no text in {place}, which has {sorted(row)}; name another, or repair "
            "that document"
        )
    return text or ""


_Reader = Callable[[str, str, int, Skipped], Iterator[str]]
_LINES: dict[str, _Reader] = {".txt": _blocks, ".jsonl": _json_lines}
_TABLES: dict[str, _Reader] = {f".{kind}": partial(_rows, kind) for kind in ("csv", "parquet", "arrow")}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
#: The files that can be read, for messages.
KINDS = f"{', '.join([*_LINES, *_TABLES])}; the first three also with {', '.join(_COMPRESSED)}"


def _reader(path: str) -> _Reader | None:
    ending = next((ending for ending in _COMPRESSED if path.endswith(ending)), "")
    plain = path.removesuffix(ending)
    readers = {**_LINES, ".csv": _TABLES[".csv"]} if ending else _LINES | _TABLES
    return next((reader for kind, reader in readers.items() if plain.endswith(kind)), None)
