"""From a corpus to data that ranks can train on: vocabulary, token ids of both splits, unigram counts, manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BertTokenizerFast

from ds_vrgd.bert.corpus import documents
from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.runfile import RunFile
from ds_vrgd.bert.sentences import split_sentences
from ds_vrgd.bert.store import Split, SplitWriter, chunk_spans
from ds_vrgd.bert.vocabulary import load_tokenizer, train_tokenizer, vocabulary_sha256

_DOCUMENTS_AT_ONCE = 256  # tokenised together; bounds the memory of the preparation


@dataclass(frozen=True)
class PreparedData:
    """What training reads.

    Attributes:
        unigram_counts: occurrences of each token id in the training split, [vocabulary].
        spans: [chunks, 2] sentence ranges per split name and sequence length, see ``chunk_spans``.
    """

    tokenizer: BertTokenizerFast
    vocabulary_sha256: str
    train: Split
    held_out: Split
    unigram_counts: npt.NDArray[np.int64]
    spans: dict[tuple[str, int], npt.NDArray[np.int64]]

    def fingerprint(self) -> str:
        """Changes, all but surely, with the documents: sha256 of how often each token occurs and where documents end.

        Not of all tokens: that would read the whole corpus at every start.
        """
        digest = hashlib.sha256(self.unigram_counts.tobytes())
        for split in (self.train, self.held_out):
            digest.update(split.documents.tobytes())
        return digest.hexdigest()


def prepare(run: RunFile, folder: Path, report: Callable[[str], None]) -> None:
    """Write the data of ``run`` into ``folder``, or check what an earlier run wrote there.

    One process does this, the others wait. The corpus is streamed (three times when the vocabulary is trained), and the
    folder appears under its name only when it is complete.

    Raises:
        InputError: the corpus cannot be used, or the folder holds other data.
    """
    if folder.exists():
        _check_manifest(run, folder)
        _add_spans(run, folder)
    else:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _write(run, partial, report)
            _add_spans(run, partial)
        except InputError:
            shutil.rmtree(partial)
            with contextlib.suppress(OSError):  # an output folder made for this and empty again
                partial.parent.rmdir()
            raise
        partial.rename(folder)


def _add_spans(run: RunFile, folder: Path) -> None:
    """Cut both splits for the run's sequence lengths, where an earlier run has not."""
    manifest = _read_manifest(folder)
    for name in ("train", "held_out"):
        split = Split.open(folder / name, manifest["dtype"])
        for length in {phase.sequence_length for phase in run.phases}:
            file = _spans_file(folder, name, length)
            if file.exists():
                continue
            spans = chunk_spans(split, length)
            if not len(spans):
                raise InputError(
                    f"the {name.replace('_', '-')} documents have no two sentences in a row, so they give no sentence "
                    "pair; use a corpus with longer documents"
                )
            np.save(file.with_suffix(".partial.npy"), spans)
            file.with_suffix(".partial.npy").replace(file)


def open_prepared(run: RunFile, folder: Path) -> PreparedData:
    """Map the data that ``prepare`` left in ``folder``."""
    if not (folder / "manifest.json").is_file():
        raise InputError(
            f"{folder} is not visible to every rank; put the output (or prepared_data) on a shared file system"
        )
    manifest = _read_manifest(folder)
    lengths = {phase.sequence_length for phase in run.phases}
    return PreparedData(
        tokenizer=load_tokenizer(folder / "tokenizer"),
        vocabulary_sha256=manifest["vocabulary_sha256"],
        train=Split.open(folder / "train", manifest["dtype"]),
        held_out=Split.open(folder / "held_out", manifest["dtype"]),
        unigram_counts=np.load(folder / "unigram_counts.npy"),
        spans={
            (name, length): np.load(_spans_file(folder, name, length), mmap_mode="r")
            for name in ("train", "held_out")
            for length in lengths
        },
    )


def _write(run: RunFile, folder: Path, report: Callable[[str], None]) -> None:
    if run.vocabulary.folder is not None:
        tokenizer = load_tokenizer(run.vocabulary.folder)
    else:
        assert run.vocabulary.size is not None  # the run file holds exactly one of the two
        report(f"training a vocabulary of {run.vocabulary.size} pieces")
        tokenizer = train_tokenizer(lambda: _training_texts(run), run.vocabulary.size)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    report("tokenising the corpus")
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    with SplitWriter(folder / "train", dtype) as train, SplitWriter(folder / "held_out", dtype) as held_out:
        for is_held_out, sentences in _tokenised(run, tokenizer):
            (held_out if is_held_out else train).add(sentences)
            if not is_held_out:
                counts += np.bincount(np.concatenate([[], *sentences]).astype(np.int64), minlength=len(counts))
    if min(train.documents, held_out.documents) < 2:
        found = train.documents + held_out.documents
        raise InputError(
            f"corpus: {run.corpus.source} gives {found} documents, of which held_out_every={run.held_out_every} leaves "
            f"{train.documents} to train on and {held_out.documents} held out, and each side needs two; add documents "
            "(a blank line separates them in text files) or change held_out_every"
        )
    np.save(folder / "unigram_counts.npy", counts)
    manifest = {
        **_data_settings(run),
        "vocabulary_sha256": vocabulary_sha256(tokenizer),
        "dtype": dtype,
        **{
            name: {"documents": split.documents, "sentences": split.sentences, "tokens": split.tokens}
            for name, split in (("train", train), ("held_out", held_out))
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    report(f"{train.documents:,} documents with {train.tokens:,} tokens to train on, {held_out.documents:,} held out")


def _numbered_documents(run: RunFile) -> Iterator[tuple[bool, str]]:
    """(is held out, text) of every document.

    Raises:
        InputError: there is none.
    """
    number = -1
    for number, text in enumerate(documents(run.corpus)):
        yield number % run.held_out_every == 0, text
    if number < 0:
        raise InputError(
            f"corpus: {run.corpus.source} holds no document: no text between blank lines; give a corpus with text"
        )


def _training_texts(run: RunFile) -> Iterator[str]:
    return (text for is_held_out, text in _numbered_documents(run) if not is_held_out)


def _tokenised(run: RunFile, tokenizer: BertTokenizerFast) -> Iterator[tuple[bool, list[list[int]]]]:
    """(is held out, token ids of each sentence) of every document."""
    numbered = _numbered_documents(run)
    while batch := list(islice(numbered, _DOCUMENTS_AT_ONCE)):
        split = [split_sentences(text) for _, text in batch]
        flat = [sentence for sentences in split for sentence in sentences]
        encoded = iter(tokenizer.backend_tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        for (is_held_out, _), sentences in zip(batch, split, strict=True):
            yield is_held_out, [encoding.ids for encoding in islice(encoded, len(sentences))]


def _data_settings(run: RunFile) -> dict[str, Any]:
    """The settings of the run file that the prepared data depends on."""
    return run.model_dump(mode="json", include={"corpus", "vocabulary", "held_out_every"})


def _check_manifest(run: RunFile, folder: Path) -> None:
    if not (folder / "manifest.json").is_file():
        raise InputError(f"{folder} exists but holds no prepared data (no manifest.json); choose another prepared_data")
    manifest = _read_manifest(folder)
    for key, wanted in _data_settings(run).items():
        if manifest[key] != wanted:
            raise InputError(
                f"{key}={wanted} in the run file, but {folder} was prepared with {manifest[key]}; restore the setting, "
                "or choose another prepared_data or --output"
            )


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def _spans_file(folder: Path, split: str, sequence_length: int) -> Path:
    return folder / split / f"spans-{sequence_length}.npy"
