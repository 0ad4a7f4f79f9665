"""Questions in the format of SQuAD, made by machine over real Wikipedia passages: no package has SQuAD itself.

A sentence of the passage with a name, number or year replaced by a wh-word (the cloze of Lewis et al. 2019,
"Unsupervised Question Answering by Cloze Translation", with the simplest translation), and what a lead says that its
subject is. The same passages give the same questions. F1 on them is never comparable with F1 on SQuAD.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_vrgd_recipes.bert.packages.catalogue import wiki_articles
from ds_vrgd_recipes.bert.sentences import split_sentences
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import write_text

_PASSAGE_WORDS = range(30, 251)
_SENTENCE_WORDS = range(6, 41)
_MOST_CLOZES = 5  # a passage
_DEV_EVERY = 10

_CAPITALISED = r"[A-Z][\w'\u2019-]+"
_NAME = rf"{_CAPITALISED}(?: (?:(?:of|the|de|von|van) )*{_CAPITALISED})*"
_NUMBER = r"\d+(?:[.,]\d+)*(?: (?:million|billion|percent|km|kilometres|miles|metres|years))?"
# After a blank or an opening quote or bracket, so never a sentence's first word, which is capitalised anyway.
_ANSWER = re.compile(rf"(?<=[\s(\"\u201c])(?:{_NAME}|{_NUMBER})(?![\w-])")
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_DEFINITION = re.compile(
    r" (is|was|are|were) ((?:an?|the|one of) [^.,;()]{6,80}?)(?=[.,;]| (?:\(|who|that|which|from|where|and) ?)"
)


def make(articles: Iterable[tuple[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Return SQuAD's ``data`` for "train" and "dev", which share no article; about a tenth of the articles is dev.

    Args:
        articles: (title, text); a text of fewer than 30 or more than 250 words is left out.
    """
    data: dict[str, list[dict[str, Any]]] = {"train": [], "dev": []}
    for title, text in articles:
        passage = " ".join(text.split())
        if len(passage.split()) not in _PASSAGE_WORDS:
            continue
        asked = {question: (answer, start) for question, answer, start in _questions(title, passage)}
        if asked:
            qas = [
                {
                    "id": _hash(f"{title}\n{question}")[:24],
                    "question": question,
                    "answers": [{"text": answer, "answer_start": start}],
                }
                for question, (answer, start) in asked.items()
            ]
            split = "train" if _number(title) % _DEV_EVERY else "dev"
            data[split].append({"title": title, "paragraphs": [{"context": passage, "qas": qas}]})
    return data


def _questions(title: str, passage: str) -> Iterator[tuple[str, str, int]]:
    """Yield (question, answer, start of the answer)."""
    clozes, begin = 0, 0
    for number, sentence in enumerate(split_sentences(passage)):
        begin = passage.index(sentence, begin)
        if number == 0:
            definition = _DEFINITION.search(sentence)
            if definition:
                yield f"What {definition[1]} {title}?", definition[2], begin + definition.start(2)
        if len(sentence.split()) in _SENTENCE_WORDS and clozes < _MOST_CLOZES:
            # An answer that occurs once has one right place.
            found = [
                match for match in _ANSWER.finditer(sentence) if passage.count(match[0]) == 1 and match[0] not in title
            ]
            if found:
                chosen = found[_number(sentence) % len(found)]
                clozes += 1
                question = sentence[: chosen.start()] + _wh_word(chosen[0]) + sentence[chosen.end() :]
                yield question.rstrip(".!?") + "?", chosen[0], begin + chosen.start()
        begin += len(sentence)


def _wh_word(answer: str) -> str:
    if _YEAR.fullmatch(answer):
        return "what year"
    return "how many" if answer[0].isdigit() else "what"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _number(text: str) -> int:
    return int(_hash(text), 16)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write ``train.json`` and ``dev.json``; return the exit status (2: input that cannot be used)."""
    parser = argparse.ArgumentParser(description="Make questions in the format of SQuAD v1.1 over Wikipedia passages.")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for train.json and dev.json")
    folder: Path = parser.parse_args(arguments).output
    try:
        paths = {split: folder / f"{split}.json" for split in ("train", "dev")}
        for path in paths.values():
            if path.exists():
                raise InputError(f"--output {folder} holds {path.name} already; remove it or give another folder")
        data = make(wiki_articles())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for split, articles in data.items():
        write_text(paths[split], json.dumps({"version": "1.1", "data": articles}) + "\n")
        questions = sum(len(paragraph["qas"]) for article in articles for paragraph in article["paragraphs"])
        print(f"{paths[split]}: {len(articles):,} articles, {questions:,} questions", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
