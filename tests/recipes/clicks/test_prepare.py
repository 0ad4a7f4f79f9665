"""From files to prepared data: nothing lost, nothing twice, the same bytes each time; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_vrgd.manifest import first_fault
from ds_vrgd_recipes.clicks.criteo import read_file
from ds_vrgd_recipes.clicks.prepare import prepare
from ds_vrgd_recipes.clicks.prepared import check_settings, open_prepared, read_manifest
from ds_vrgd_recipes.clicks.sources import FilesData
from ds_vrgd_recipes.clicks.vocabulary import SlotCounts
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.clicks.cases import lines, write_files


def silent(text: str) -> None:
    pass


def settings(train: Path | str, test: Path, **changes: Any) -> FilesData:
    return FilesData(source="files", train=[str(train)], test=[str(test)], hash_slots=1 << 16, **changes)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return write_files(tmp_path)


def test_every_row_is_there_once_encoded_by_the_training_sets_vocabulary(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    prepare(settings(*files), tmp_path / "data", silent, part_rows=150)
    data = open_prepared(tmp_path / "data")
    assert read_manifest(tmp_path / "data")["clicks"]["train"]["parts"] == 4
    counts = SlotCounts(1 << 16)
    blocks = {path: list(read_file(path, 0.0)) for path in files}
    for block in blocks[files[0]]:
        counts.add(block)
    vocabulary = counts.vocabulary(2)
    assert data.table_sizes == vocabulary.table_sizes
    for path, clicks in zip(files, (data.train, data.test), strict=True):
        (block,) = blocks[path]
        wanted = np.concatenate(
            [block.labels[:, None].astype(np.int32), block.dense.view(np.int32), vocabulary.encode(block)], axis=1
        )
        found = clicks.span(0, len(clicks))
        assert not np.array_equal(found, wanted), "rows are in random order"
        np.testing.assert_array_equal(*(rows[np.lexsort(rows.T)] for rows in (found, wanted)))


def test_the_kept_slots_are_in_the_folder(files: tuple[Path, Path], tmp_path: Path) -> None:
    prepare(settings(*files), tmp_path / "data", silent)
    slots = np.load(tmp_path / "data" / "slots.npy")
    ends = np.cumsum([size - 2 for size in read_manifest(tmp_path / "data")["table_sizes"]])
    assert len(slots) == ends[-1]
    assert all((np.diff(of_feature.astype(np.int64)) > 0).all() for of_feature in np.split(slots, ends[:-1]))


def test_the_same_bytes_each_time_also_after_a_kill(files: tuple[Path, Path], tmp_path: Path) -> None:
    prepare(settings(*files), tmp_path / "first", silent)
    (tmp_path / "second.partial" / "work").mkdir(parents=True)  # what a killed one may leave
    (tmp_path / "second.partial" / "work" / "train-0").write_bytes(b"some rows")
    prepare(settings(*files), tmp_path / "second", silent)
    manifests = [(tmp_path / name / "manifest.json").read_text() for name in ("first", "second")]
    assert manifests[0] == manifests[1]
    assert first_fault(tmp_path / "second") is None
    assert not (tmp_path / "second.partial").exists()
    prepare(settings(*files), tmp_path / "second", silent)  # there already: nothing to do


def test_a_changed_file_is_found(files: tuple[Path, Path], tmp_path: Path) -> None:
    prepare(settings(*files), tmp_path / "data", silent)
    part = tmp_path / "data" / "train" / "part-00000.npy"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    fault = first_fault(tmp_path / "data")
    assert fault is not None
    assert fault.startswith("train/part-00000.npy has sha256")


@pytest.mark.parametrize("change", [{"min_count": 3}, {"max_bad_fraction": 0.5}])
def test_other_settings_are_refused(files: tuple[Path, Path], tmp_path: Path, change: dict[str, Any]) -> None:
    prepare(settings(*files), tmp_path / "data", silent)
    ((key, value),) = change.items()
    with pytest.raises(InputError, match=rf"data\.{key}={value}, but .* was prepared with"):
        check_settings(settings(*files, **change), tmp_path / "data")


def test_a_source_that_has_grown_is_refused_and_one_that_is_gone_is_not(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    prepare(settings(*files), tmp_path / "data", silent)
    with files[0].open("a") as file:
        file.write(lines(1, seed=9)[0] + "\n")
    with pytest.raises(InputError, match=r"day_0 has \d+ bytes, and had \d+ when"):
        check_settings(settings(*files), tmp_path / "data")
    files[0].unlink()
    check_settings(settings(*files), tmp_path / "data")


def test_what_cannot_be_used_is_named_and_leaves_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    def refusal(given: FilesData | None) -> str:
        with pytest.raises(InputError) as caught:
            prepare(given, tmp_path / "data", silent)
        assert not list(tmp_path.glob("data*"))
        return str(caught.value)

    train, test = files
    assert "data.train: no file matches" in refusal(settings(tmp_path / "day_*.gz", test))
    assert f"{test} is in train and in test" in refusal(settings(tmp_path / "day_[01]", test))
    assert "prepared_data" in refusal(None)
    only_clicks = tmp_path / "only"
    only_clicks.write_text("".join("1" + line[1:] + "\n" for line in lines(50, seed=5)))
    assert "data.test: 50 of 50 rows have label 1" in refusal(settings(train, only_clicks))
    (tmp_path / "commas").write_text(train.read_text().replace("\t", ","))
    assert "600 of 600 lines are not in the Criteo format" in refusal(settings(tmp_path / "commas", test))


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(InputError, match=r"holds no prepared data \(no manifest\.json\)"):
        read_manifest(tmp_path / "data")
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({"format": 1, "sequences": {}}))
    with pytest.raises(InputError, match="was not prepared by this version"):
        read_manifest(tmp_path / "data")
