"""What is checked before prepared data are trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from ds_vrgd_recipes.bert.prepared import open_prepared, verify_prepared
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.ranks import Ranks


class OneOf:
    """Rank ``rank`` of ``size``, whose partners have found nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else None for rank in range(self.size)]


def verify(run: RunFile, folder: Path, rank: int = 0, size: int = 1) -> None:
    verify_prepared(run, folder, cast(Ranks, OneOf(rank, size)))


@pytest.fixture
def folder(data_folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(data_folder, tmp_path / "data")


@pytest.mark.parametrize(
    "name",
    ["train/000002.arrow", "sequences-24/held_out/000000.arrow", "unigram_counts.npy", "tokenizer/tokenizer.json"],
)
def test_a_changed_file_is_found_by_the_rank_whose_share_it_is(run: RunFile, folder: Path, name: str) -> None:
    verify(run, folder)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    found = []
    for rank in range(3):
        try:
            verify(run, folder, rank, 3)
        except InputError as error:
            found.append(str(error))
    assert len(found) == 1
    assert f"{name} has sha256" in found[0]
    assert "remove the folder and prepare the data again" in found[0]


def test_missing_and_shortened_files(run: RunFile, folder: Path) -> None:
    (folder / "train" / "000001.arrow").write_bytes(b"short")
    with pytest.raises(InputError, match=r"train/000001\.arrow has 5 bytes, not \d+"):
        verify(run, folder)
    (folder / "train" / "000001.arrow").unlink()
    with pytest.raises(InputError, match=r"train/000001\.arrow cannot be read \(No such file"):
        verify(run, folder)
    (folder / "manifest.json").write_text('{"format":', encoding="utf-8")
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        verify(run, folder)
    with pytest.raises(InputError, match="not visible to every rank"):
        verify(run, folder / "absent")


def test_too_few_sequences_for_one_global_batch(run: RunFile, folder: Path) -> None:
    sequences = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["sequences"]["32"]["train"]

    def with_batch(size: int) -> RunFile:
        return run.model_copy(
            update={"phases": [run.phases[0], run.phases[1].model_copy(update={"global_batch": size})]}
        )

    verify(with_batch(sequences), folder)
    with pytest.raises(
        InputError,
        match=rf"phase 2: global_batch={sequences + 1}, but .* has {sequences} training sequences of length 32",
    ):
        verify(with_batch(sequences + 1), folder)


def test_the_hash_of_the_data_is_that_of_the_documents_alone(run: RunFile, folder: Path, data_folder: Path) -> None:
    """Lengths that are added later leave it; a checkpoint must be able to tell that the documents are the same."""
    phase = run.phases[0].model_copy(update={"sequence_length": 32})
    one_length = open_prepared(run.model_copy(update={"phases": [phase]}), folder)
    assert one_length.sha256 == open_prepared(run, data_folder).sha256
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["train/000000.arrow"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert open_prepared(run, folder).sha256 != one_length.sha256
