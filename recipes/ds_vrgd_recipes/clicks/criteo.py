"""The Criteo format: lines of a label, 13 integers and 26 hexadecimal categories, separated by tabs, without a header.

Every field except for the label may be empty. A line that does not fit is counted, named and left out; too many of them
are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ds_vrgd_recipes.run.errors import InputError

DENSE = 13
CATEGORIES = 26
COLUMNS = ("label", *(f"I{n + 1}" for n in range(DENSE)), *(f"C{n + 1}" for n in range(CATEGORIES)))

_BLOCK_BYTES = 1 << 24
_HEX_DIGITS = 8
_INTEGER = r"^-?[0-9]{1,18}$"  # int64 holds it
_NAMED = 3  # bad lines of a file that are shown

# Digit values by character; 255: not a hexadecimal digit.
_NIBBLES = np.full(256, 255, dtype=np.uint8)
for _digits, _first in (("0123456789", 0), ("abcdef", 10), ("ABCDEF", 10)):
    for _offset, _digit in enumerate(_digits):
        _NIBBLES[ord(_digit)] = _first + _offset


@dataclass(frozen=True)
class Rows:
    """Some lines of a file.

    Attributes:
        labels: 0 or 1, [rows].
        dense: log(1 + x), [rows, 13]; 0 where x is missing or negative.
        categories: 32-bit values, [rows, 26]; 0 where missing.
        missing: where a category is empty, [rows, 26].
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.float32]
    categories: npt.NDArray[np.uint32]
    missing: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass
class BadLines:
    """The lines of one file that do not fit.

    Args:
        path: of the file.
        most: fraction of its lines that may be bad.
    """

    path: Path
    most: float
    lines: int = 0
    bad: int = 0
    named: tuple[str, ...] = ()

    def skip(self, text: str, fault: str) -> None:
        """Count one bad line."""
        self.bad += 1
        if len(self.named) < _NAMED:
            self.named += (f"{fault}: {text[:60]!r}",)

    def judge(self) -> None:
        """Check the lines so far.

        Raises:
            InputError: too many of them are bad.
        """
        if self.bad > self.most * self.lines:
            raise InputError(
                f"{self.path}: {self.bad:,} of {self.lines:,} lines are not in the Criteo format (label, {DENSE} "
                f"integers, {CATEGORIES} hexadecimal categories, separated by tabs), such as {'; '.join(self.named)}. "
                f"Correct the file, or raise max_bad_fraction={self.most} to leave such lines out"
            )


def read_file(path: Path, most_bad: float, report: Callable[[str], None] = lambda text: None) -> Iterator[Rows]:
    """Stream a file, plain or compressed as its name says (.gz and others), block by block.

    Args:
        most_bad: fraction of bad lines beyond which the file is refused: among its first block (16 MB), and in all.
        report: is called with the number of lines that were left out, if any.

    Raises:
        InputError: the file cannot be read, is empty or cut short, or has too many bad lines.
    """
    bad = BadLines(path, most_bad)
    first = True
    try:
        for batch in _batches(path, bad):
            yield _rows(batch, bad)
            if first:
                bad.judge()
                first = False
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path} cannot be read as lines of {len(COLUMNS)} columns: {error}") from error
    bad.judge()
    if bad.bad:
        report(f"{path}: {bad.bad:,} of {bad.lines:,} lines left out, such as {'; '.join(bad.named)}")


def _batches(path: Path, bad: BadLines) -> Iterator[pa.RecordBatch]:
    def wrong_number_of_columns(row: Any) -> str:
        bad.lines += 1
        bad.skip(row.text, f"{row.actual_columns} columns")
        return "skip"

    reader = csv.open_csv(
        path,
        # latin1 has a character for every byte: bytes that are not text make a bad line, too.
        read_options=csv.ReadOptions(
            column_names=COLUMNS, block_size=_BLOCK_BYTES, use_threads=False, encoding="latin1"
        ),
        parse_options=csv.ParseOptions(
            delimiter="\t", quote_char=False, invalid_row_handler=wrong_number_of_columns, ignore_empty_lines=False
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(COLUMNS, pa.binary()), strings_can_be_null=False),
    )
    with reader:
        yield from reader


def _rows(batch: pa.RecordBatch, bad: BadLines) -> Rows:
    rows = batch.num_rows
    bad.lines += rows
    faults = np.zeros((rows, len(COLUMNS)), dtype=np.bool_)
    is_one = pc.equal(batch.column(0), b"1").to_numpy(zero_copy_only=False)
    faults[:, 0] = ~(is_one | pc.equal(batch.column(0), b"0").to_numpy(zero_copy_only=False))
    dense = np.empty((rows, DENSE), dtype=np.float32)
    for number in range(DENSE):
        dense[:, number], faults[:, 1 + number] = _log_integers(batch.column(1 + number))
    categories = np.empty((rows, CATEGORIES), dtype=np.uint32)
    missing = np.empty((rows, CATEGORIES), dtype=np.bool_)
    for number in range(CATEGORIES):
        column = 1 + DENSE + number
        categories[:, number], missing[:, number], faults[:, column] = _hexadecimal(batch.column(column))
    is_bad = faults.any(axis=1)
    if not is_bad.any():
        return Rows(is_one.astype(np.uint8), dense, categories, missing)
    for row in np.flatnonzero(is_bad).tolist():
        column = int(faults[row].argmax())
        bad.skip(batch.column(column)[row].as_py().decode(errors="replace"), COLUMNS[column])
    kept = ~is_bad
    return Rows(is_one[kept].astype(np.uint8), dense[kept], categories[kept], missing[kept])


def _log_integers(column: pa.Array) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return log(1 + x) of a column of integers, and where it has something else."""
    is_empty = pc.equal(pc.binary_length(column), 0)
    is_integer = pc.match_substring_regex(column, pattern=_INTEGER)
    values = pc.if_else(is_integer, column, b"0").cast(pa.string()).cast(pa.int64())
    faults = pc.invert(pc.or_(is_empty, is_integer))
    logs = np.log1p(np.maximum(values.to_numpy(), 0)).astype(np.float32)
    return logs, faults.to_numpy(zero_copy_only=False)


def _hexadecimal(column: pa.Array) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Return values of at most 8 hexadecimal digits, where the column is empty, and where it has something else."""
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset :][: len(column) + 1]
    starts, lengths = offsets[:-1], np.diff(offsets)
    text = np.frombuffer(column.buffers()[2] or b"", dtype=np.uint8)
    text = np.concatenate([text[: offsets[-1]], np.zeros(_HEX_DIGITS, dtype=np.uint8)])  # digits beyond the end
    values = np.zeros(len(column), dtype=np.uint32)
    faults = lengths > _HEX_DIGITS
    for place in range(_HEX_DIGITS):
        nibbles = _NIBBLES[text[starts + place]]
        inside = place < lengths
        faults |= inside & (nibbles == 255)
        values = np.where(inside, (values << np.uint32(4)) | (nibbles & 15), values)
    return values, lengths == 0, faults
