"""Prepared clicks: a folder of parts that every rank maps into memory, with a manifest.

A part is an ``.npy`` file of int32, [rows, 40]: the label, 13 floats by their bits, 26 rows of embedding tables; 160
bytes a row. Within a set (``train``, ``test``) rows are in random order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ds_vrgd_recipes.clicks.criteo import CATEGORIES, DENSE
from ds_vrgd_recipes.clicks.sources import Data
from ds_vrgd_recipes.run.manifest import check_prepared, read_prepared

#: Raised whenever the same settings give other bytes.
FORMAT = 1
WORDS = 1 + DENSE + CATEGORIES
SETS = TRAIN, TEST = "train", "test"

Records = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """Rows as tensors.

    Attributes:
        dense: [rows, 13] fp32.
        categories: rows of the embedding tables, [rows, 26] int32.
        labels: 0 or 1, [rows] fp32.
    """

    dense: Tensor
    categories: Tensor
    labels: Tensor

    @classmethod
    def of(cls, records: Tensor) -> Batch:
        """Split records, [rows, 40] int32 on any device."""
        dense = records[:, 1 : 1 + DENSE].contiguous().view(torch.float32)
        return cls(dense, records[:, 1 + DENSE :], records[:, 0].float())


def records(labels: npt.NDArray[Any], dense: npt.NDArray[np.float32], categories: Records) -> Records:
    """Return rows as they are stored, [rows, 40]."""
    return np.concatenate([labels[:, None].astype(np.int32), dense.view(np.int32), categories], axis=1)


class Clicks:
    """All parts of one set."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts
        self._first = np.cumsum([0, *map(len, parts)]).tolist()

    def __len__(self) -> int:
        rows: int = self._first[-1]
        return rows

    def span(self, first: int, last: int) -> Records:
        """Copy the rows [first, last)."""
        number = bisect_right(self._first, first) - 1
        pieces = []
        while first < last:
            end = min(last, self._first[number + 1])
            pieces.append(self._parts[number][first - self._first[number] : end - self._first[number]])
            first, number = end, number + 1
        return np.concatenate(pieces) if pieces else np.empty((0, WORDS), dtype=np.int32)


@dataclass(frozen=True)
class PreparedClicks:
    """The data of a training.

    Attributes:
        sha256: of all rows.
        table_sizes: rows of each feature's embedding table.
    """

    sha256: str
    table_sizes: list[int]
    train: Clicks
    test: Clicks


def part_name(set_name: str, number: int) -> str:
    """Return the file of a part within the folder."""
    return f"{set_name}/part-{number:05d}.npy"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; see ``read_prepared``."""
    return read_prepared(folder, FORMAT, "clicks")


def check_settings(settings: Data, folder: Path) -> None:
    """Compare settings and source with those that ``folder`` was prepared with; see ``check_prepared``."""
    manifest = read_manifest(folder)
    wanted = {f"data.{key}": value for key, value in settings.model_dump(mode="json").items()}
    saved = {f"data.{key}": value for key, value in manifest["settings"].items()}
    check_prepared(folder, "data", wanted, saved, manifest["source"])


def open_prepared(folder: Path) -> PreparedClicks:
    """Map the data in ``folder``."""
    manifest = read_manifest(folder)
    sets, digest = {}, hashlib.sha256()
    for name in SETS:
        names = [part_name(name, number) for number in range(manifest["clicks"][name]["parts"])]
        sets[name] = Clicks([np.load(folder / part, mmap_mode="r") for part in names])
        for part in names:
            digest.update(manifest["files"][part]["sha256"].encode())
    return PreparedClicks(digest.hexdigest(), manifest["table_sizes"], sets[TRAIN], sets[TEST])
