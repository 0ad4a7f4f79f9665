"""Reading the Criteo format: every value, what is missing, what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from ds_vrgd_recipes.clicks.criteo import read_file
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.clicks.cases import lines


def line(label: str = "1", dense: list[str] | None = None, categories: list[str] | None = None) -> str:
    return "\t".join([label, *(dense or ["3"] * 13), *(categories or ["0000ffff"] * 26)])


def write(path: Path, *text: str) -> Path:
    path.write_bytes("".join(each + "\n" for each in text).encode("latin-1"))
    return path


def test_values_and_what_is_missing(tmp_path: Path) -> None:
    dense = ["0", "1", "-2", "", "123456789012", *["7"] * 8]
    categories = ["68fd1e64", "FFFFFFFF", "", "a", "0", *["00000001"] * 21]
    (rows,) = read_file(write(tmp_path / "day_0", line("0"), line("1", dense, categories)), 0.0)
    assert rows.labels.tolist() == [0, 1]
    # log(1 + x); a negative number counts as 0, as in DLRM's own preprocessing, and so does a missing one
    wanted = np.log1p([0, 1, 0, 0, 123456789012, *[7] * 8]).astype(np.float32)
    np.testing.assert_array_equal(rows.dense[1], wanted)
    assert rows.categories[1].tolist() == [0x68FD1E64, 0xFFFFFFFF, 0, 0xA, 0, *[1] * 21]
    assert rows.missing[1].tolist() == [False, False, True, *[False] * 23]
    assert not rows.missing[0].any()


def test_any_compression_and_size_of_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [each + "\n" for each in lines(500, seed=1)]
    (tmp_path / "day_0").write_text("".join(text))
    # two members, as `cat a.gz b.gz` makes them
    members = [gzip.compress("".join(part).encode()) for part in (text[:200], text[200:])]
    (tmp_path / "day_0.gz").write_bytes(b"".join(members))
    (whole,) = read_file(tmp_path / "day_0", 0.0)
    monkeypatch.setattr("ds_vrgd_recipes.clicks.criteo._BLOCK_BYTES", 20_000)
    blocks = list(read_file(tmp_path / "day_0.gz", 0.0))
    assert len(blocks) > 5
    for name in ("labels", "dense", "categories", "missing"):
        np.testing.assert_array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(whole, name))


BAD = {
    "39 columns": line().rpartition("\t")[0],
    "label": line("2"),
    "I1": line("1", ["3.5", *["3"] * 12]),
    "I13": line("1", [*["3"] * 12, "1" * 19]),
    "C1": line("1", None, ["123456789", *["1"] * 25]),
    "C26": line("1", None, [*["1"] * 25, "00g0"]),
    "1 columns": "\xff",
}


def test_bad_lines_are_left_out_counted_and_named(tmp_path: Path) -> None:
    good = [line("0")] * 93
    path = write(tmp_path / "day_0", *good[:50], *BAD.values(), *good[50:])
    said: list[str] = []
    rows = list(read_file(path, 0.07, said.append))
    assert sum(map(len, rows)) == 93
    assert len(said) == 1
    assert "7 of 100 lines left out" in said[0]


@pytest.mark.parametrize("fault", BAD)
def test_more_bad_lines_than_stated_are_an_error(tmp_path: Path, fault: str) -> None:
    path = write(tmp_path / "day_0", *[line()] * 9, BAD[fault])
    with pytest.raises(InputError, match=rf"day_0: 1 of 10 lines .*{fault}.*max_bad_fraction=0.05"):
        list(read_file(path, 0.05))


def test_a_file_of_another_format_is_refused_at_its_first_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ds_vrgd_recipes.clicks.criteo._BLOCK_BYTES", 20_000)
    path = write(tmp_path / "day_0", *[line("2")] * 1000)
    with pytest.raises(InputError, match=r"such as label: '2'"):
        next(rows for rows in read_file(path, 0.1) if len(rows))


@pytest.mark.parametrize("content", [b"", gzip.compress(b"1\t2\n" * 100)[:40]])
def test_empty_and_cut_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "day_0.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"day_0\.gz"):
        list(read_file(path, 0.5))
