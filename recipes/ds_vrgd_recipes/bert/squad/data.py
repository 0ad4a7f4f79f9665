"""Files in the format of SQuAD v1.1: articles of paragraphs, with questions that a span of the paragraph answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from ds_vrgd_recipes.run.errors import InputError


class Answer(BaseModel):
    """``text`` at character ``answer_start`` of the paragraph."""

    text: str
    answer_start: int


class Question(BaseModel):
    """A question and the answers that several people gave; a single one in training files."""

    id: str
    question: str
    answers: list[Answer]
    is_impossible: bool = False  # of SQuAD v2.0, which is refused


class Paragraph(BaseModel):
    """A text and the questions about it."""

    context: str
    qas: list[Question]


class Article(BaseModel):
    """The paragraphs of one article."""

    title: str = ""
    paragraphs: list[Paragraph]


class SquadFile(BaseModel):
    """The whole file."""

    version: str = ""
    data: list[Article] = Field(min_length=1)


@dataclass(frozen=True)
class Item:
    """One question, the number of its text among the contexts, and its answers."""

    id: str
    question: str
    context: int
    answers: list[Answer]


@dataclass(frozen=True)
class Questions:
    """Texts and the questions about them."""

    contexts: list[str]
    items: list[Item]

    def truths(self) -> dict[str, list[str]]:
        """Return the accepted answers by question id."""
        return {item.id: [answer.text for answer in item.answers] for item in self.items}

    def has_answer_at_its_place(self, item: Item) -> bool:
        """Return whether the first answer, the one of the training, is where ``answer_start`` says."""
        answer, context = item.answers[0], self.contexts[item.context]
        start = answer.answer_start
        return start >= 0 and bool(answer.text.strip()) and context.startswith(answer.text, start)


def read_squad(path: Path, option: str) -> Questions:
    """Read a file and check its form.

    Args:
        option: of the command line, for messages.

    Raises:
        InputError: the file cannot be read, is no SQuAD JSON or SQuAD v2.0, or holds no question, or one id twice.
    """
    try:
        content = SquadFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{option} {path} cannot be read ({error.strerror}); give the path of a SQuAD v1.1 JSON"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]).lstrip(".")
        raise InputError(
            f"{option} {path} is not in the format of SQuAD v1.1: {place + ': ' if place else ''}{first['msg']}; the "
            "file is JSON as in train-v1.1.json: data[], paragraphs[], context and qas[], id, question and answers[], "
            "text and answer_start"
        ) from error
    contexts: list[str] = []
    items: list[Item] = []
    seen: set[str] = set()
    for article in content.data:
        for paragraph in article.paragraphs:
            for question in paragraph.qas:
                _check(question, seen, f"{option} {path}")
                items.append(Item(question.id, question.question, len(contexts), question.answers))
            contexts.append(paragraph.context)
    if not items:
        raise InputError(f"{option} {path} holds no question; give a SQuAD v1.1 JSON that does")
    return Questions(contexts, items)


def _check(question: Question, seen: set[str], where: str) -> None:
    if question.is_impossible:
        raise InputError(
            f"{where}: question {question.id} is_impossible, so this is SQuAD v2.0; its measure and training differ: "
            "give a file of SQuAD v1.1, where every question has an answer"
        )
    if not question.answers:
        raise InputError(
            f"{where}: question {question.id} has no answer; in SQuAD v1.1 every question has one: remove the question"
        )
    if question.id in seen:
        raise InputError(
            f"{where}: two questions have the id {question.id}, and predictions are kept by id; rename or remove one"
        )
    seen.add(question.id)
