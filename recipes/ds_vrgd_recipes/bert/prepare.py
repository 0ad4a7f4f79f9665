"""From a corpus to data that ranks can train on: read, leave out what repeats, train a vocabulary, tokenise.

The folder is written as ``....partial`` and gets its name when it is complete. Files that are needed only until then
are in its ``work``. Every stage leaves files that are whole or missing, so that the same command resumes after a kill.
The bytes of the result depend on the corpus and the settings alone, not on kills or the number of processes.
"""

from __future__ import annotations

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

from ds_vrgd.manifest import sha256_of
from ds_vrgd_recipes.bert import spool
from ds_vrgd_recipes.bert.completing import add_lengths, complete
from ds_vrgd_recipes.bert.corpus import documents, source_files, source_packages
from ds_vrgd_recipes.bert.duplicates import find, range_count
from ds_vrgd_recipes.bert.prepared import FORMAT, check_settings, read_manifest
from ds_vrgd_recipes.bert.progress import Progress
from ds_vrgd_recipes.bert.sources import DataSettings
from ds_vrgd_recipes.bert.textfiles import Skipped, size_and_version
from ds_vrgd_recipes.bert.tokenising import PartResult, documents_of_part, tokenise
from ds_vrgd_recipes.bert.vocabulary import count_characters, load_tokenizer, train_tokenizer, vocabulary_sha256
from ds_vrgd_recipes.bert.workers import Workers
from ds_vrgd_recipes.run.errors import InputError, PreparationFailed
from ds_vrgd_recipes.run.files import write_text
from ds_vrgd_recipes.run.locks import LOCK, locked

# The vocabulary is trained on at most so much text, spread evenly over the corpus: memory must not grow with it.
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
        settings: None uses the data as they are; they must exist.
        lengths: of sequences, in tokens; one tokenisation gives all.
        report: called with lines for the user.
        processes: besides this one; with 0 all work is done here. The result is the same.
        part_characters: text of one unit of work and one shard; the result depends on it.

    Raises:
        InputError: the corpus cannot be used, or the folder holds other data.
        PreparationFailed: the disk is full or a process was killed; finished files stay.
    """
    try:
        with Workers(processes) as workers:
            if check_folder(settings, folder):
                add_lengths(folder, lengths, workers, report)
            elif settings is not None:
                _prepare(settings, sorted(set(lengths)), folder, part_characters, workers, report)
    except OSError as error:
        raise PreparationFailed(
            f"the data cannot be written to {folder}: {error}; make room or permit it, and start the same command "
            "again: it resumes where it stopped"
        ) from error


def check_folder(settings: DataSettings | None, folder: Path) -> bool:
    """Return whether ``folder`` holds the data of ``settings``, as far as its manifest shows; False: make them.

    Args:
        settings: None for any data.

    Raises:
        InputError: it holds other data, or there are none and no corpus to make them of.
    """
    if not folder.exists():
        if settings is None:
            raise InputError(
                f"prepared_data={folder} is not there, and no corpus is given to make it of; correct the path, "
                "prepare it with scripts/prepare_bert_data.py, or give corpus and vocabulary"
            )
        return False
    if settings is None:
        read_manifest(folder)
    else:
        check_settings(settings, folder)
    return True


def _prepare(
    settings: DataSettings,
    lengths: list[int],
    folder: Path,
    part_characters: int,
    workers: Workers,
    report: Callable[[str], None],
) -> None:
    partial_folder = folder.with_name(folder.name + ".partial")
    with locked(partial_folder, "preparing data"):
        if not (partial_folder / "manifest.json").exists():
            _begin(settings, lengths, part_characters, partial_folder)
            try:
                _write(settings, lengths, partial_folder, part_characters, workers, report)
            except InputError:  # the corpus must change, so all of this is useless
                shutil.rmtree(partial_folder)
                raise
        shutil.rmtree(partial_folder / _WORK, ignore_errors=True)
        partial_folder.rename(folder)


def _begin(settings: DataSettings, lengths: list[int], part_characters: int, folder: Path) -> None:
    """Record what is being prepared, or compare it with the preparation that an earlier run began.

    Raises:
        InputError: the earlier preparation was another one.
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
                    "restore the setting to resume it, or remove that folder"
                )
        return
    rest = sorted(path.name for path in folder.iterdir() if path.name not in (_WORK, LOCK))
    if rest:
        raise InputError(f"{folder} holds {', '.join(rest)} and is not an interrupted preparation; remove it")
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
    ranges = range_count(source.pop("hashed"))
    for _ in workers.map(partial(find, work, parts, ranges), range(ranges)):
        pass
    characters = source["characters"]
    pieces, pieces_sha256 = _vocabulary(settings, folder, parts, ranges, characters, workers, report)
    tokenise_part = partial(
        tokenise,
        work=work,
        folder=folder,
        ranges=ranges,
        held_out_every=settings.held_out_every,
        pieces=pieces,
        lengths=lengths,
    )
    results: list[PartResult] = []
    with Progress("tokenising", report, characters) as progress:
        for number, result in enumerate(workers.map(tokenise_part, range(parts))):
            results.append(result)
            progress.add(spool.read_summary(work, number).characters)
    complete(settings, folder, work, lengths, source, pieces_sha256, results, report)


def _read(
    settings: DataSettings, work: Path, part_characters: int, workers: Workers, report: Callable[[str], None]
) -> dict[str, Any]:
    """Copy the corpus into parts; return what the manifest says of the source, and the number of hashes."""
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
        before = [size_and_version(path) for path in files]
        read = spool.parts(documents(settings.corpus, skipped), part_characters)
        for summary in workers.map(partial(spool.store_part, work, settings.deduplicate_from), read):
            parts += 1
            digest.update(bytes.fromhex(summary.sha256))
            for key in totals:
                totals[key] += getattr(summary, key)
            progress.add(summary.characters)
        if not parts:
            names = " and ".join(corpus.source for corpus in settings.corpus)
            raise InputError(f"corpus: {names} holds no document: no text between blank lines; give a corpus with text")
        # An URL is not downloaded twice for a hash: that of all documents is in the manifest, too.
        hashes = list(workers.map(_version, files))
    for path, earlier in zip(files, before, strict=True):
        if size_and_version(path) != earlier:
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
            {"path": path, "size": size, **version}
            for path, (size, _), version in zip(files, before, hashes, strict=True)
        ],
    }
    write_text(note, json.dumps(source))
    return source


def _version(path: str) -> dict[str, str]:
    return {"version": size_and_version(path)[1]} if "://" in path else {"sha256": sha256_of(Path(path))}


def _vocabulary(
    settings: DataSettings,
    folder: Path,
    parts: int,
    range_count: int,
    characters: int,
    workers: Workers,
    report: Callable[[str], None],
) -> tuple[int, str]:
    """Train or copy the tokenizer, unless an earlier run has; return the number of pieces and their hash."""
    target, given = folder / "tokenizer", settings.vocabulary.given
    if not target.exists():
        if given is not None:
            tokenizer = load_tokenizer(given)
        else:
            size = settings.vocabulary.size
            assert size is not None  # the settings have exactly one of the two
            stride = -(-characters // _VOCABULARY_CHARACTERS)
            sample = range(0, parts, stride)
            share = f"on {len(sample)} of {parts} parts of the corpus" if stride > 1 else "on the corpus"
            report(f"training a vocabulary of {size:,} pieces {share}")
            texts = partial(_training_texts, folder / _WORK, range_count, settings.held_out_every)
            counted = sum(workers.map(partial(_count, texts), sample), start=count_characters([]))
            # In a process of its own, which frees the hundreds of megabytes that this needs when it ends.
            with Workers(min(workers.processes, 1), threads=True) as alone:
                (tokenizer,) = alone.map(partial(_train, texts, sample, counted), [size])
        aside = folder / _WORK / "tokenizer"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            tokenizer.save_pretrained(str(aside))
        except Exception as error:  # the library raises its own for a full disk, which is not an OSError
            raise OSError(f"{aside}: {error}") from error
        aside.rename(target)
    tokenizer = load_tokenizer(target)
    sha256 = vocabulary_sha256(tokenizer)
    if given is not None and vocabulary_sha256(load_tokenizer(given)) != sha256:
        raise InputError(f"vocabulary: {given} has changed since this preparation began; start again to begin anew")
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
