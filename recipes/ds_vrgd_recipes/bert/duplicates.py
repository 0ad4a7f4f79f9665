"""The paragraphs that occur more than once in a corpus of any size, found on disk.

Each part of the corpus has a file with the sorted 128-bit hashes of its paragraphs. A range of hash values is compared
over all files at once, and each range holds about a million hashes: memory is bounded for any corpus. The first
occurrence in the order of the corpus stays.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ds_vrgd_recipes.run.files import write_binary

_AT_ONCE = 1 << 20

# 128 bits: among 10**9 different paragraphs the chance that two share a hash is 1.5e-21.
_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("position", "<u4")])
_PLACE = np.dtype([("part", "<u4"), ("position", "<u4")])


def paragraph_hash(paragraph: str) -> bytes:
    """Return the hash of a paragraph, 16 bytes."""
    return hashlib.blake2b(paragraph.encode(), digest_size=16).digest()


def write_hashes(work: Path, part: int, positions: dict[bytes, int]) -> None:
    """Store the hashes of a part, with the positions of their paragraphs in it."""
    table = np.zeros(len(positions), dtype=_HASH)
    halves = np.array(np.frombuffer(b"".join(positions) or b"", dtype="<u8")).reshape(-1, 2)
    table["high"], table["low"] = halves[:, 0], halves[:, 1]
    table["position"] = np.fromiter(positions.values(), dtype=np.uint32, count=len(positions))
    table = table[np.lexsort((table["low"], table["high"]))]
    path = _hashes(work, part)
    path.parent.mkdir(exist_ok=True)
    write_binary(path, lambda file: np.save(file, table))


def range_count(hashed: int) -> int:
    """Return the number of equal ranges of hash values to compare, for ``hashed`` hashes in all."""
    return max(1, math.ceil(hashed / _AT_ONCE))


def find(work: Path, parts: int, count: int, number: int) -> None:
    """Write the positions of all paragraphs whose hash is in range ``number`` of ``count`` and in an earlier part."""
    path = _places(work, number)
    if path.exists():
        return
    first, last = (((number + end) << 64) // count for end in (0, 1))
    found, owners = [], []
    for part in range(parts):
        table = np.load(_hashes(work, part), mmap_mode="r")
        # Python's bisect reads a few pages; numpy would first copy the whole column.
        begin, end = (bisect_left(table["high"], bound) for bound in (first, last))
        found.append(np.array(table[begin:end]))
        owners.append(np.full(len(found[-1]), part, dtype=np.uint32))
    hashes, owner = np.concatenate(found), np.concatenate(owners)
    order = np.lexsort((owner, hashes["low"], hashes["high"]))
    hashes, owner = hashes[order], owner[order]
    again = (hashes["high"][1:] == hashes["high"][:-1]) & (hashes["low"][1:] == hashes["low"][:-1])
    places = np.zeros(int(again.sum()), dtype=_PLACE)
    places["part"], places["position"] = owner[1:][again], hashes["position"][1:][again]
    places = places[np.lexsort((places["position"], places["part"]))]
    path.parent.mkdir(exist_ok=True)
    write_binary(path, lambda file: np.save(file, places))


def duplicates_of(work: Path, part: int, count: int) -> set[int]:
    """Return the positions of the paragraphs of ``part`` to leave out, after ``count`` ranges were compared."""
    positions: set[int] = set()
    for number in range(count):
        places: npt.NDArray[np.void] = np.load(_places(work, number), mmap_mode="r")
        begin, end = np.searchsorted(places["part"], [part, part + 1])
        positions.update(places["position"][begin:end].tolist())
    return positions


def _hashes(work: Path, part: int) -> Path:
    return work / "hashes" / f"{part:06d}.npy"


def _places(work: Path, number: int) -> Path:
    return work / "duplicates" / f"{number:06d}.npy"
