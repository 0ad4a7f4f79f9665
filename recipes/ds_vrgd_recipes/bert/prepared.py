"""The folder of prepared data: its manifest, the checks before it is used, and how ranks read it.

``manifest.json`` holds the settings, the source, counts, and under ``files`` size and sha256 of every other file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import BertTokenizerFast

from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.bert.sources import DataSettings
from ds_vrgd_recipes.bert.store import Chunks, Shard, Split, open_chunks
from ds_vrgd_recipes.bert.tokenising import SPLITS, chunks_name, shard_name
from ds_vrgd_recipes.bert.vocabulary import load_tokenizer, vocabulary_sha256
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.manifest import check_prepared, read_prepared, verify_files
from ds_vrgd_recipes.run.ranks import Ranks

#: Raised whenever the same settings give other bytes.
FORMAT = 3

UNIGRAM_COUNTS = "unigram_counts.npy"


@dataclass(frozen=True)
class PreparedData:
    """The data of a training.

    Attributes:
        sha256: of all documents as token ids; sequences of any length follow from them.
        unigram_counts: occurrences of each token id in the training split, [vocabulary].
        chunks: per split name and sequence length.
    """

    tokenizer: BertTokenizerFast
    vocabulary_sha256: str
    sha256: str
    train: Split
    held_out: Split
    unigram_counts: npt.NDArray[np.int64]
    chunks: dict[tuple[str, int], Chunks]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder; see ``read_prepared``."""
    return read_prepared(folder, FORMAT, "sequences")


def check_settings(settings: DataSettings, folder: Path) -> None:
    """Compare settings, vocabulary and source with those that ``folder`` was prepared with; see ``check_prepared``."""
    manifest = read_manifest(folder)
    wanted = settings.model_dump(mode="json")
    check_prepared(folder, "corpus", wanted, manifest["settings"], manifest["source"]["files"])
    given = settings.vocabulary.folder  # a name is compared with the settings, above
    if given is not None and given.exists():
        found = vocabulary_sha256(load_tokenizer(given))
        if found != manifest["vocabulary"]["sha256"]:
            raise InputError(
                f"vocabulary.folder={given} holds another vocabulary (sha256 {found}) than the one that {folder} was "
                f"prepared with ({manifest['vocabulary']['sha256']}); restore it, or choose another prepared_data"
            )


def verify_prepared(run: RunFile, folder: Path, ranks: Ranks) -> None:
    """Compare every file with its sha256, and the sequences with the run's batches. Collective.

    Raises:
        InputError: a file is not as it was written, or an update would see a sequence twice, on every rank.
    """
    verify_files(folder, ranks)
    manifest = read_manifest(folder)
    for number, phase in enumerate(run.phases, start=1):
        found = manifest["sequences"][str(phase.sequence_length)]["train"]
        if found < phase.global_batch:
            raise InputError(
                f"phase {number}: global_batch={phase.global_batch}, but {folder} has {found:,} training sequences of "
                f"length {phase.sequence_length}, and one update must not see a sequence twice; lower global_batch or "
                "give a larger corpus"
            )


def open_prepared(run: RunFile, folder: Path) -> PreparedData:
    """Map the data in ``folder``, which has at least the lengths of the run."""
    manifest = read_manifest(folder)
    splits = {
        split: Split([Shard.open(folder / shard_name(split, number)) for number in manifest["shards"][split]])
        for split in SPLITS
    }
    digest = hashlib.sha256()
    for split in SPLITS:
        for number in manifest["shards"][split]:
            digest.update(manifest["files"][shard_name(split, number)]["sha256"].encode())
    return PreparedData(
        tokenizer=load_tokenizer(folder / "tokenizer"),
        vocabulary_sha256=manifest["vocabulary"]["sha256"],
        sha256=digest.hexdigest(),
        train=splits["train"],
        held_out=splits["held_out"],
        unigram_counts=np.load(folder / UNIGRAM_COUNTS),
        chunks={
            (split, length): Chunks(
                splits[split],
                [open_chunks(folder / chunks_name(split, number, length)) for number in manifest["shards"][split]],
            )
            for split in SPLITS
            for length in run.sequence_lengths
        },
    )
