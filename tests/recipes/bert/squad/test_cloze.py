"""Machine-made questions: their answers stand where they say, and the same text gives the same questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_vrgd_recipes.bert.squad import cloze
from ds_vrgd_recipes.bert.squad.data import read_squad

PASSAGE = (
    "Lavender is a genus of flowering plants in the mint family, grown since antiquity. "
    "It was described by Carl Linnaeus in 1753 and is native to dry lands of the Old World. "
    "In a good year farmers harvest about 1,500 tonnes of it, which they sell  all over Europe."
)


def test_what_is_asked() -> None:
    data = cloze.make([("Lavender", PASSAGE)])
    (article,) = data["train"] + data["dev"]
    (paragraph,) = article["paragraphs"]
    assert paragraph["context"] == " ".join(PASSAGE.split())
    asked = {each["question"]: each["answers"][0]["text"] for each in paragraph["qas"]}
    assert asked.pop("What is Lavender?") == "a genus of flowering plants in the mint family"
    (first, first_answer), (second, second_answer) = asked.items()
    sentences = paragraph["context"].split(". ")
    wh = {"Carl Linnaeus": "what", "1753": "what year", "Old World": "what", "1,500": "how many", "Europe": "what"}
    for question, answer, sentence in ((first, first_answer, sentences[1]), (second, second_answer, sentences[2])):
        assert question == sentence.rstrip(".").replace(answer, wh[answer]) + "?"


def test_answers_stand_in_their_place_and_splits_share_no_article(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    articles = [(f"Plant {number}", PASSAGE.replace("Lavender", f"Plant {number}")) for number in range(60)]
    articles.append(("Short", "Too short to ask Anna about."))
    monkeypatch.setattr(cloze, "wiki_articles", lambda: iter(articles))
    assert cloze.main(["--output", str(tmp_path / "a")]) == 0
    assert "train.json: " in capsys.readouterr().out
    titles = {}
    for split in ("train", "dev"):
        path = tmp_path / "a" / f"{split}.json"
        source = read_squad(path, "--train-file")
        assert all(source.has_answer_at_its_place(item) for item in source.items)
        titles[split] = {article["title"] for article in json.loads(path.read_text(encoding="utf-8"))["data"]}
    assert not titles["train"] & titles["dev"]
    assert titles["train"] | titles["dev"] == {title for title, _ in articles[:-1]}
    assert 1 <= len(titles["dev"]) <= 15

    assert cloze.main(["--output", str(tmp_path / "b")]) == 0
    for split in ("train", "dev"):
        assert (tmp_path / "a" / f"{split}.json").read_bytes() == (tmp_path / "b" / f"{split}.json").read_bytes()
    assert cloze.main(["--output", str(tmp_path / "b")]) == 2
    assert "holds train.json already" in capsys.readouterr().err
