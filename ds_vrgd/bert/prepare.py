"""From a corpus to data that ranks can train on: read, leave out what repeats, train a vocabulary, tokenise.

The folder is written as ``....partial`` and gets its name when it is complete. What is needed only until then is in its
``work``. Every stage leaves files that are whole or not there, so that the same command goes on after a kill; the bytes
of the result depend on the corpus and the settings alone, not on kills or the number of processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import BertTokenizerFast

from ds_vrgd.bert import spool
from ds_vrgd.bert.completing import add_lengths, complete
from ds_vrgd.bert.corpus import documents, source_files, source_packages
from ds_vrgd.bert.duplicates import find, ranges
from ds_vrgd.bert.prepared import FORMAT, check_settings
from ds_vrgd.bert.progress import Progress
from ds_vrgd.bert.sources import DataSettings
from ds_vrgd.bert.textfiles import Skipped
from ds_vrgd.bert.tokenising import PartJob, PartResult, documents_of_part, tokenise
from ds_vrgd.bert.vocabulary import count_characters, load_tokenizer, train_tokenizer, vocabulary_sha256
from ds_vrgd.bert.workers import Workers
from ds_vrgd.training.errors import InputError, PreparationFailed
from ds_vrgd.training.files import sha256_of, write_text
from ds_vrgd.training.locks import locked

# The vocabulary is trained on at most so much text, parts that lie evenly in the corpus: memory must not grow with it.
_VOCABULARY_CHARACTERS = 1 << 28

_WORK = "work"


def prepare(
    settings: DataSettings | None,
    lengths: Sequence[int],
    folder: Path,
    report: Callable[[str], None],
    processes: int = 0,
    part_characters: int = spool.PART_CHARACTERS,
) -> None:
    """Write the data of ``settings`` into ``folder``, or check what an earlier run wrote there and add lengths.

    Args:
        settings: None takes the data as they are, and they must be there.
        lengths: of sequences, in tokens; all from one tokenisation.
        report: called with lines for the user.
        processes: beside this one; 0: all work is done here. The result is the same.
        part_characters: how much text is one unit of work and one shard; the result depends on it.

    Raises:
        InputError: the corpus cannot be used, or the folder holds other data.
        PreparationFailed: the disk is full or a process was killed; what is done stays.
    """
    try:
        with Workers(processes) as workers:
            if folder.exists():
                if settings is not None:
                    check_settings(settings, folder)
                add_lengths(folder, lengths, workers, report)
            elif settings is None:
                raise InputError(
                    f"prepared_data={folder} is not there, and no corpus is given to make it of; correct the path, "
                    "prepare it with scripts/prepare_bert_data.py, or give corpus and vocabulary"
                )
            else:
                _prepare(settings, sorted(set(lengths)), folder, part_characters, workers, report)
    except OSError as error:
        raise PreparationFailed(
            f"the data cannot be written to {folder}: {error}; make room or permit it, and start the same command "
            "again: it goes on where it stopped"
        ) from error


def _prepare(
    settings: DataSettings,
    lengths: list[int],
    folder: Path,
    part_characters: int,
    workers: Workers,
    report: Callable[[str], None],
) -> None:
    partial_folder = folder.with_name(folder.name + ".partial")
    made = [parent for parent in (partial_folder, *partial_folder.parents) if not parent.exists()]
    partial_folder.mkdir(parents=True, exist_ok=True)
    with locked(partial_folder):
        if not (partial_folder / "manifest.json").exists():
            _begin(settings, lengths, part_characters, partial_folder)
            try:
                _write(settings, lengths, partial_folder, part_characters, workers, report)
            except InputError:  # the corpus must change, so nothing of this is of use
                shutil.rmtree(partial_folder)
                with contextlib.suppress(OSError):  # folders made for this and empty again
                    for parent in made[1:]:
                        parent.rmdir()
                raise
        shutil.rmtree(partial_folder / _WORK, ignore_errors=True)
        partial_folder.rename(folder)


def _begin(settings: DataSettings, lengths: list[int], part_characters: int, folder: Path) -> None:
    """Note what is being prepared, or compare it with what an earlier run began.

    Raises:
        InputError: that was something else.
    """
    now = {
        "format": FORMAT,
        **settings.model_dump(mode="json"),
        "lengths": lengths,
        "part_characters": part_characters,
    }
    note = folder / _WORK / "settings.json"
    if note.exists():
        before = json.loads(note.read_text(encoding="utf-8"))
        for key in now:
            if before.get(key) != now[key]:
                raise InputError(
                    f"{key}={now[key]}, but {folder} holds the beginning of a preparation with {before.get(key)}; "
                    "restore the setting to go on with it, or remove that folder"
                )
        return
    rest = sorted(path.name for path in folder.iterdir() if path.name != _WORK)
    if rest:
        raise InputError(f"{folder} holds {', '.join(rest)} and is no preparation that was interrupted; remove it")
    note.parent.mkdir(exist_ok=True)
    write_text(note, json.dumps(now, indent=1) + "\n")


def _write(
    settings: DataSettings,
    lengths: list[int],
    folder: Path,
    part_characters: int,
    workers: Workers,
    report: Callable[[str], None],
) -> None:
    work = folder / _WORK
    source = _read(settings, work, part_characters, workers, report)
    parts = source["parts"]
    jobs = ranges(work, parts, source.pop("hashed"))
    for _ in workers.map(find, jobs):
        pass
    characters = source["characters"]
    pieces, pieces_sha256 = _vocabulary(settings, folder, parts, len(jobs), characters, workers, report)
    part_jobs = [
        PartJob(
            number=number,
            work=work,
            folder=folder,
            ranges=len(jobs),
            held_out_every=settings.held_out_every,
            dtype="uint16" if pieces <= 2**16 else "uint32",
            vocabulary=pieces,
            lengths=tuple(lengths),
        )
        for number in range(parts)
    ]
    results: list[PartResult] = []
    with Progress("tokenising", report, characters) as progress:
        for number, result in enumerate(workers.map(tokenise, part_jobs)):
            results.append(result)
            progress.add(spool.read_summary(work, number).characters)
    complete(settings, folder, work, lengths, source, pieces_sha256, results, report)


def _read(
    settings: DataSettings, work: Path, part_characters: int, workers: Workers, report: Callable[[str], None]
) -> dict[str, Any]:
    """Lay the corpus aside; returns what the manifest says of the source, and the number of hashes."""
    note = work / "source.json"
    if note.exists():
        found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        return found
    skipped = Skipped()
    digest = hashlib.sha256()
    totals = dict.fromkeys(("documents", "characters", "hashed", "duplicates", "duplicate_characters"), 0)
    parts = 0
    packages = source_packages(settings.corpus)
    for name, package in packages.items():
        if not package.pinned:
            report(
                f"{name} is {package.path.name} (sha256 {package.sha256}), which security updates replace: another "
                "machine may get another text"
            )
    with Progress("reading", report) as progress:
        files = source_files(settings.corpus)
        before = [path.stat() for path in files]
        read = spool.parts(documents(settings.corpus, skipped), work, settings.deduplicate_from, part_characters)
        for summary in workers.map(spool.lay_aside, read):
            parts += 1
            digest.update(bytes.fromhex(summary.sha256))
            for key in totals:
                totals[key] += getattr(summary, key)
            progress.add(summary.characters)
        if not parts:
            names = " and ".join(corpus.source for corpus in settings.corpus)
            raise InputError(f"corpus: {names} holds no document: no text between blank lines; give a corpus with text")
        hashes = list(workers.map(sha256_of, files))
    for path, earlier in zip(files, before, strict=True):
        later = path.stat()
        if (earlier.st_size, earlier.st_mtime_ns) != (later.st_size, later.st_mtime_ns):
            raise InputError(f"corpus: {path} was changed while it was read; start again when it is complete")
    source = {
        "parts": parts,
        **totals,
        **asdict(skipped),
        "sha256": digest.hexdigest(),
        "packages": [
            {"name": name, "file": package.path.name, "sha256": package.sha256, "pinned": package.pinned}
            for name, package in packages.items()
        ],
        "files": [
            {"path": str(path), "size": stat.st_size, "sha256": sha256}
            for path, stat, sha256 in zip(files, before, hashes, strict=True)
        ],
    }
    write_text(note, json.dumps(source))
    return source


def _vocabulary(
    settings: DataSettings,
    folder: Path,
    parts: int,
    range_count: int,
    characters: int,
    workers: Workers,
    report: Callable[[str], None],
) -> tuple[int, str]:
    """Train or copy the tokenizer, unless an earlier run has; returns the number of pieces and their hash."""
    target, given = folder / "tokenizer", settings.vocabulary.folder
    if not target.exists():
        if given is not None:
            tokenizer = load_tokenizer(given)
        else:
            size = settings.vocabulary.size
            assert size is not None  # the settings hold exactly one of the two
            stride = -(-characters // _VOCABULARY_CHARACTERS)
            sample = range(0, parts, stride)
            share = f"on {len(sample)} of {parts} parts of the corpus" if stride > 1 else "on the corpus"
            report(f"training a vocabulary of {size:,} pieces {share}")
            texts = partial(_training_texts, folder / _WORK, range_count, settings.held_out_every)
            counted = sum(workers.map(partial(_count, texts), sample), start=count_characters([]))
            # In a process of its own, which takes the hundreds of megabytes that this needs away with it.
            with Workers(min(workers.processes, 1), threads=True) as alone:
                (tokenizer,) = alone.map(partial(_train, texts, sample, counted), [size])
        aside = folder / _WORK / "tokenizer"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            tokenizer.save_pretrained(str(aside))
        except Exception as error:  # the library's own, for a full disk, is no OSError
            raise OSError(f"{aside}: {error}") from error
        aside.rename(target)
    tokenizer = load_tokenizer(target)
    sha256 = vocabulary_sha256(tokenizer)
    if given is not None and vocabulary_sha256(load_tokenizer(given)) != sha256:
        raise InputError(
            f"vocabulary.folder={given} has changed since this preparation began; start again to begin anew"
        )
    return len(tokenizer), sha256


def _training_texts(work: Path, range_count: int, held_out_every: int, part: int) -> Iterator[str]:
    first = spool.read_summary(work, part).first_document
    for offset, paragraphs in enumerate(documents_of_part(work, part, range_count)):
        if (first + offset) % held_out_every:
            yield from paragraphs


def _train(texts: Callable[[int], Iterator[str]], sample: range, counted: Any, size: int) -> BertTokenizerFast:
    return train_tokenizer(counted, chain.from_iterable(map(texts, sample)), size)


def _count(texts: Callable[[int], Iterator[str]], part: int) -> Any:
    return count_characters(texts(part))
