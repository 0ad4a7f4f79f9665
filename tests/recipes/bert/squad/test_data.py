"""Files of questions: what is read, and what is told about those that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_recipes.bert.squad.data import read_squad
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.bert.squad.cases import paragraph, squad, write


def one() -> dict[str, Any]:
    return squad(paragraph("Ada lives in Rome.", ("1", "Where?", "Rome"), ("2", "Who?", "Ada")), paragraph(""))


def test_questions_know_their_text(tmp_path: Path) -> None:
    content = one()
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"].append({"text": "in Rome", "answer_start": 10})
    found = read_squad(write(tmp_path / "a.json", content), "--train-file")
    assert found.contexts == ["Ada lives in Rome.", ""]
    assert [(item.id, item.context) for item in found.items] == [("1", 0), ("2", 0)]
    assert found.truths() == {"1": ["Rome", "in Rome"], "2": ["Ada"]}


@pytest.mark.parametrize(
    "start, text, stands",
    [(13, "Rome", True), (12, "Rome", False), (-5, "Rome", False), (99, "Rome", False), (3, " ", False)],
)
def test_whether_an_answer_stands_where_it_says(tmp_path: Path, start: int, text: str, stands: bool) -> None:
    content = one()
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": text, "answer_start": start}]
    found = read_squad(write(tmp_path / "a.json", content), "--train-file")
    assert found.has_answer_at_its_place(found.items[0]) is stands


def broken(change: str) -> Any:
    content = one()
    first = content["data"][0]["paragraphs"][0]["qas"][0]
    if change == "impossible":
        first.update(is_impossible=True, answers=[])
    elif change == "unanswered":
        first["answers"] = []
    elif change == "twice":
        first["id"] = "2"
    elif change == "no question":
        content["data"][0]["paragraphs"] = []
    elif change == "no article":
        content["data"] = []
    elif change == "no context":
        del content["data"][0]["paragraphs"][1]["context"]
    else:
        content = [1]
    return content


@pytest.mark.parametrize(
    "change, expected",
    [
        ("impossible", r"question 1 is_impossible, so this is SQuAD v2\.0.*give a file of SQuAD v1\.1"),
        ("unanswered", "question 1 has no answer"),
        ("twice", "two questions have the id 2"),
        ("no question", "holds no question"),
        ("no article", "data: List should have at least 1 item"),
        ("no context", r"data\[0\]\.paragraphs\[1\]\.context: Field required"),
        ("a list", "is not in the format of SQuAD v1.1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: str, expected: str) -> None:
    with pytest.raises(InputError, match=rf"--predict-file .*a\.json.*{expected}"):
        read_squad(write(tmp_path / "a.json", broken(change)), "--predict-file")


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.json cannot be read \(No such file or directory\)"):
        read_squad(tmp_path / "a.json", "--train-file")
    (tmp_path / "a.json").write_text("question,answer\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"is not in the format of SQuAD v1\.1: Invalid JSON"):
        read_squad(tmp_path / "a.json", "--train-file")
