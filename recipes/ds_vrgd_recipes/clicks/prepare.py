"""From files in the Criteo format to data that ranks can train on, in memory that does not grow with the data.

Two passes: the first counts rows and categories; the second writes every row, its categories as rows of embedding
tables, into a part chosen at random, and then shuffles each part. So any run of rows is a random sample, and training
reads from the disk in large pieces.

The folder is written as ``....partial`` and gets its name when it is complete. The next preparation removes the
remains of a killed one, and begins anew.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_vrgd_recipes.clicks.criteo import Rows, read_file
from ds_vrgd_recipes.clicks.flights import fetch_flights, write_flights
from ds_vrgd_recipes.clicks.prepared import FORMAT, SETS, TRAIN, WORDS, check_settings, part_name, records
from ds_vrgd_recipes.clicks.sources import Data, FilesData
from ds_vrgd_recipes.clicks.vocabulary import SlotCounts, Vocabulary
from ds_vrgd_recipes.run.errors import InputError, PreparationFailed
from ds_vrgd_recipes.run.files import fingerprint, write_binary, write_text
from ds_vrgd_recipes.run.locks import LOCK, locked

_PART_ROWS = 1 << 21  # 336 MB; two of that are in memory when a part is shuffled
_SEED = 0  # of the order of rows; every epoch of a run has another order on top of it

Report = Callable[[str], None]


def prepare(settings: Data | None, folder: Path, report: Report, part_rows: int = _PART_ROWS) -> None:
    """Write the data of ``settings`` into ``folder``, or check what an earlier run wrote there.

    Args:
        settings: None uses the data as they are; they must exist.
        report: called with lines for the user.
        part_rows: rows of one file, about; it must fit into memory twice.

    Raises:
        InputError: the files cannot be used, or the folder holds other data.
        PreparationFailed: the disk is full.
    """
    if folder.exists():
        if settings is not None:
            check_settings(settings, folder)
        return
    if settings is None:
        raise InputError(f"prepared_data={folder} is not there, and no data is given to make it of; give data")
    partial = folder.with_name(folder.name + ".partial")
    try:
        with locked(partial, "preparing data"):
            _clear(partial)
            try:
                _write(settings, partial, part_rows, report)
            except InputError:
                shutil.rmtree(partial)
                raise
            partial.rename(folder)
    except OSError as error:
        raise PreparationFailed(
            f"the data cannot be written to {folder}: {error}; make room or permit it, and start the same command again"
        ) from error


def _clear(partial: Path) -> None:
    for path in partial.iterdir():
        if path.name != LOCK:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@dataclass(frozen=True)
class _Source:
    """The files of one set, and the fraction of their lines that may be bad."""

    files: list[Path]
    most_bad: float

    def rows(self, report: Report = lambda text: None) -> Iterator[Rows]:
        for path in self.files:
            yield from read_file(path, self.most_bad, report)


def _write(settings: Data, folder: Path, part_rows: int, report: Report) -> None:
    work = folder / "work"
    work.mkdir()
    sources = dict(zip(SETS, _sources(settings, work), strict=True))
    counts = SlotCounts(settings.hash_slots)
    before = _stamps(sources)
    of_set = {}
    for name, source in sources.items():
        report(f"{name}: counting {len(source.files)} files")
        rows = clicks = 0
        for block in source.rows(report):
            if name == TRAIN:
                counts.add(block)
            rows += len(block)
            clicks += int(block.labels.sum())
        if not 0 < clicks < rows:
            raise InputError(f"data.{name}: {clicks:,} of {rows:,} rows have label 1; both labels must be there")
        of_set[name] = {"rows": rows, "clicks": clicks, "parts": -(-rows // part_rows)}
    vocabulary = counts.vocabulary(settings.min_count)
    for name, source in sources.items():
        report(f"{name}: writing {of_set[name]['rows']:,} rows in {of_set[name]['parts']} parts")
        _scatter(source, vocabulary, work, name, of_set[name]["parts"])
        for number in range(of_set[name]["parts"]):
            _shuffle(work / f"{name}-{number}", folder / part_name(name, number), name, number)
    if _stamps(sources) != before:
        raise InputError("data: a file was changed while it was read; start again when all are complete")
    shutil.rmtree(work)
    write_binary(folder / "slots.npy", lambda file: np.save(file, np.concatenate(vocabulary.kept)))
    _complete(settings, folder, of_set, vocabulary, before if isinstance(settings, FilesData) else {})
    tables = sum(vocabulary.table_sizes)
    report(
        f"26 tables of {tables:,} rows in all, from {min(vocabulary.table_sizes):,} to {max(vocabulary.table_sizes):,}"
    )


def _sources(settings: Data, work: Path) -> tuple[_Source, _Source]:
    if isinstance(settings, FilesData):
        train, test = settings.files()
        return _Source(train, settings.max_bad_fraction), _Source(test, settings.max_bad_fraction)
    train_file, test_file = work / "flights-train.tsv", work / "flights-test.tsv"
    write_flights(fetch_flights(), train_file, test_file, settings.test_every)
    return _Source([train_file], 0.0), _Source([test_file], 0.0)


def _stamps(sources: dict[str, _Source]) -> dict[str, tuple[int, int]]:
    """Return size and time of every file."""
    stats = {str(path): path.stat() for source in sources.values() for path in source.files}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def _scatter(source: _Source, vocabulary: Vocabulary, work: Path, name: str, parts: int) -> None:
    """Append every row to one of the parts."""
    random = np.random.default_rng((_SEED, SETS.index(name)))
    for block in source.rows():
        encoded = records(block.labels, block.dense, vocabulary.encode(block))
        part = random.integers(parts, size=len(encoded))
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=parts)).tolist()
        for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
            # Opened each time: there may be more parts than files that a process may have open.
            with (work / f"{name}-{number}").open("ab") as file:
                file.write(encoded[order[first:last]].tobytes())


def _shuffle(scattered: Path, target: Path, name: str, number: int) -> None:
    """Write a part in random order."""
    rows = np.fromfile(scattered, dtype=np.int32).reshape(-1, WORDS)
    order = np.random.default_rng((_SEED, SETS.index(name), number)).permutation(len(rows))
    target.parent.mkdir(exist_ok=True)
    write_binary(target, lambda file: np.save(file, rows[order]))
    scattered.unlink()


def _complete(
    settings: Data, folder: Path, of_set: dict[str, Any], vocabulary: Vocabulary, files: dict[str, tuple[int, int]]
) -> None:
    """Write the manifest, last of all."""
    written = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    manifest = {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json"),
        "source": [{"path": path, "size": size} for path, (size, _) in files.items()],
        "clicks": of_set,
        "table_sizes": vocabulary.table_sizes,
        "files": {str(path.relative_to(folder)): fingerprint(path)._asdict() for path in written},
    }
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")
