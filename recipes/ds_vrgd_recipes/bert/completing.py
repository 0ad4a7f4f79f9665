"""The end of a preparation: the manifest, and sequence lengths that are added to complete data later."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ds_vrgd.manifest import first_fault
from ds_vrgd_recipes.bert.prepared import FORMAT, UNIGRAM_COUNTS, read_manifest
from ds_vrgd_recipes.bert.sources import DataSettings
from ds_vrgd_recipes.bert.store import Shard
from ds_vrgd_recipes.bert.tokenising import SPLITS, PartResult, counts_name, cut, shard_name
from ds_vrgd_recipes.bert.vocabulary import load_tokenizer
from ds_vrgd_recipes.bert.workers import Workers
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import fingerprint, write_binary, write_text
from ds_vrgd_recipes.run.locks import locked


def complete(
    settings: DataSettings,
    folder: Path,
    work: Path,
    lengths: Sequence[int],
    source: dict[str, Any],
    vocabulary_sha256: str,
    results: Sequence[PartResult],
    report: Callable[[str], None],
) -> None:
    """Add up the results of the parts and write the manifest, last of all files.

    Raises:
        InputError: too few documents, or none with two sentences.
    """
    splits = {
        split: {
            key: sum(result.splits[split][key] for result in results) for key in ("documents", "sentences", "tokens")
        }
        for split in SPLITS
    }
    train, held_out = splits["train"], splits["held_out"]
    if min(train["documents"], held_out["documents"]) < 2:
        names = " and ".join(corpus.source for corpus in settings.corpus)
        raise InputError(
            f"corpus: {names} gives {train['documents'] + held_out['documents']} documents, of which "
            f"held_out_every={settings.held_out_every} leaves {train['documents']} to train on and "
            f"{held_out['documents']} held out, and each side needs two; add documents (a blank line separates them in "
            "text files) or change held_out_every"
        )
    sequences = {
        str(length): {
            split: sum(result.sequences[split][str(length)] for result in results if split in result.sequences)
            for split in SPLITS
        }
        for length in lengths
    }
    _check_sequences(sequences)
    tokenizer = load_tokenizer(folder / "tokenizer")
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for number in range(len(results)):
        counts += np.load(counts_name(work, number))
    write_binary(folder / UNIGRAM_COUNTS, lambda file: np.save(file, counts))
    source["duplicates"] += sum(result.duplicates for result in results)
    source["duplicate_characters"] += sum(result.duplicate_characters for result in results)
    source["cut_sentences"] = sum(result.cut_sentences for result in results)
    unknown = int(counts[tokenizer.unk_token_id])
    files = {name: file for result in results for name, file in result.files.items()}
    for path in (folder / UNIGRAM_COUNTS, *sorted((folder / "tokenizer").iterdir())):
        files[str(path.relative_to(folder))] = fingerprint(path)._asdict()
    manifest = {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json"),
        "made_with": {name: version(name) for name in ("tokenizers", "pyarrow")},
        "source": source,
        "vocabulary": {"pieces": len(tokenizer), "sha256": vocabulary_sha256, "unknown_in_train": unknown},
        **splits,
        "sequences": sequences,
        "shards": {
            split: [number for number, result in enumerate(results) if split in result.sequences] for split in SPLITS
        },
        "files": {name: files[name] for name in sorted(files)},
    }
    _write_manifest(folder, manifest)
    for line in _summary(manifest):
        report(line)


def add_lengths(folder: Path, lengths: Sequence[int], workers: Workers, report: Callable[[str], None]) -> None:
    """Cut the documents of complete data for the ``lengths`` that it does not have yet.

    Raises:
        InputError: a length gives no sequence, or a file is not as it was written.
    """
    if all(str(length) in read_manifest(folder)["sequences"] for length in lengths):
        return
    with locked(folder, "preparing data"):
        manifest = read_manifest(folder)  # another run may have added some meanwhile
        for length in lengths:
            if str(length) in manifest["sequences"]:
                continue
            report(f"cutting the documents into sequences of {length}")
            totals = dict.fromkeys(SPLITS, 0)
            jobs = [(folder, split, number, length) for split in SPLITS for number in manifest["shards"][split]]
            for job, (count, files) in zip(jobs, workers.map(_cut, jobs), strict=True):
                totals[job[1]] += count
                manifest["files"] |= files
            manifest["sequences"][str(length)] = totals
        manifest["files"] = {name: manifest["files"][name] for name in sorted(manifest["files"])}
        manifest["sequences"] = {
            length: manifest["sequences"][length] for length in sorted(manifest["sequences"], key=int)
        }
        _check_sequences(manifest["sequences"])
        _write_manifest(folder, manifest)


def _cut(job: tuple[Path, str, int, int]) -> tuple[int, dict[str, dict[str, int | str]]]:
    folder, split, number, length = job
    name = shard_name(split, number)
    fault = first_fault(folder, only=name)
    if fault is not None:
        raise InputError(f"prepared data {folder}: {fault}; remove the folder and prepare the data again")
    return cut(Shard.open(folder / name), folder, split, number, length)


def _check_sequences(sequences: dict[str, dict[str, int]]) -> None:
    for found in sequences.values():
        for split in SPLITS:
            if not found[split]:
                raise InputError(
                    f"the {split.replace('_', '-')} documents have no two sentences in a row, so they give no sentence "
                    "pair; use a corpus with longer documents"
                )


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


def _summary(manifest: dict[str, Any]) -> list[str]:
    """Return the lines for the user, with everything that was left out or cut."""
    source, train = manifest["source"], manifest["train"]
    lines = [
        f"{train['documents']:,} documents with {train['tokens']:,} tokens to train on, "
        f"{manifest['held_out']['documents']:,} held out; sequences to train on: "
        + ", ".join(f"{found['train']:,} of {length}" for length, found in manifest["sequences"].items())
    ]
    for key, text in (
        (
            "duplicates",
            f"left out: {source['duplicates']:,} paragraphs that occur before "
            f"({source['duplicate_characters'] / 1e6:,.1f} MB)",
        ),
        ("empty_documents", f"left out: {source['empty_documents']:,} empty documents"),
        ("empty_files", f"left out: {source['empty_files']:,} empty files"),
        ("cut_documents", f"cut: {source['cut_documents']:,} times a document of more than 16 M characters"),
        ("cut_sentences", f"cut: {source['cut_sentences']:,} sentences of more than 8,192 characters"),
    ):
        if source[key]:
            lines.append(text)
    share = manifest["vocabulary"]["unknown_in_train"] / max(1, train["tokens"])
    if share > 0.01:
        lines.append(
            f"warning: {share:.1%} of the training tokens are [UNK]; is it the right vocabulary for this text?"
        )
    return lines
