"""Documents out of one file: plain text, JSON lines, Parquet, Arrow."""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ds_vrgd.training.errors import InputError

_LONGEST_LINE = 1 << 28  # bytes
_ROWS_AT_ONCE = 64  # of a Parquet file

_UTF8 = "convert the file, for example with iconv -f latin1 -t utf-8"


@dataclass
class Skipped:
    """What was read and left out, or cut."""

    empty_documents: int = 0
    empty_files: int = 0
    cut_documents: int = 0


def text_files(path: Path) -> list[Path]:
    """The files to read at ``path``, a file or a folder, sorted.

    Raises:
        InputError: there is none.
    """
    kinds = ", ".join(_READERS)
    if path.is_file():
        if _reader(path) is None:
            raise InputError(f"corpus.path={path} is none of the files that can be read ({kinds}); convert it to one")
        return [path]
    if not path.is_dir():
        raise InputError(f"corpus.path={path} is not a folder; give a folder of UTF-8 text files, or one file")
    files = sorted(file for file in path.rglob("*") if file.is_file() and _reader(file) is not None)
    if not files:
        raise InputError(f"corpus.path={path} holds no file that can be read ({kinds}); put the text there as UTF-8")
    return files


def file_documents(path: Path, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    """Documents of one file.

    Args:
        text_column: of files that are made of rows.
        largest: a block of a plain text file ends before it has more characters, even without a blank line.
        skipped: counts such ends.

    Raises:
        InputError: the file is damaged, not UTF-8, or has no such column; it names the file and the line or row.
    """
    reader = _reader(path)
    assert reader is not None  # one of text_files
    try:
        yield from reader(path, text_column, largest, skipped)
    except OSError as error:  # gzip's and Arrow's own errors are some of these
        raise InputError(f"corpus.path: {path} cannot be read ({error}); repair or remove it") from error


def _blocks(path: Path, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    """Blocks of lines between blank lines."""
    block: list[str] = []
    characters = 0
    with path.open("rb") as file:
        for _, line in _lines(path, file):
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


def _json_lines(path: Path, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        file = stack.enter_context(opener(path, "rb"))
        try:
            for number, line in _lines(path, file):
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
        except (EOFError, zlib.error) as error:
            raise InputError(
                f"corpus.path: {path} is damaged or cut off ({error}); make or download it again"
            ) from error


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded."""
    number = 0
    while raw := file.readline(_LONGEST_LINE):
        number += 1
        if len(raw) == _LONGEST_LINE and not raw.endswith(b"\n"):
            raise InputError(
                f"corpus.path: {path} line {number} is longer than {_LONGEST_LINE >> 20} MiB; put line breaks into it"
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


def _parquet(path: Path, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    try:
        with pq.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, text_column)
            yield from _column(file.iter_batches(_ROWS_AT_ONCE, columns=[text_column]))
    except pa.ArrowException as error:
        raise _damaged(path, error) from error


def _arrow(path: Path, text_column: str, largest: int, skipped: Skipped) -> Iterator[str]:
    """Both forms of Arrow's IPC: the stream, which ``datasets`` writes, and the file."""
    try:
        with pa.memory_map(str(path)) as file:
            try:
                reader = pa.ipc.open_stream(file)
                batches: Iterator[Any] = iter(reader)
            except pa.ArrowInvalid:
                file.seek(0)
                reader = pa.ipc.open_file(file)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            _check_column(path, reader.schema, text_column)
            yield from _column(batch.select([text_column]) for batch in batches)
    except pa.ArrowException as error:
        raise _damaged(path, error) from error


def _column(batches: Iterator[Any]) -> Iterator[str]:
    return (value.as_py() or "" for batch in batches for value in batch.column(0))


def _check_column(path: Path, schema: Any, text_column: str) -> None:
    names = schema.names
    found = schema.field(text_column).type if text_column in names else None
    if found is None or not (pa.types.is_string(found) or pa.types.is_large_string(found)):
        raise InputError(
            f"corpus.text_column={text_column} is no text column of {path}, which has {sorted(names)}; name one of them"
        )


def _text(row: dict[str, Any], text_column: str, place: str) -> str:
    text = row.get(text_column, False)
    if text is not None and not isinstance(text, str):
        raise InputError(
            f"corpus.text_column={text_column} is no text in {place}, which has {sorted(row)}; name another, or repair "
            "that document"
        )
    return text or ""


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"corpus.path: {path} is damaged ({error}); make or download it again")


_Reader = Callable[[Path, str, int, Skipped], Iterator[str]]
_READERS: dict[str, _Reader] = {
    ".txt": _blocks,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def _reader(path: Path) -> _Reader | None:
    return next((reader for ending, reader in _READERS.items() if path.name.endswith(ending)), None)
