"""Windows over texts: no gap, the answer in its place, the way back to the characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_vrgd_recipes.bert.squad.data import Questions, read_squad
from ds_vrgd_recipes.bert.squad.windows import WindowSize, most_context, tokenise, window_spans
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.bert.squad.cases import paragraph, small_tokenizer, squad, write


def questions(tmp_path: Path, *paragraphs: dict[str, Any]) -> Questions:
    return read_squad(write(tmp_path / "a.json", squad(*paragraphs)), "--train-file")


@pytest.mark.parametrize(
    "tokens, room, stride, expected",
    [
        (5, 10, 3, [(0, 5)]),
        (10, 10, 3, [(0, 10)]),
        (11, 10, 3, [(0, 10), (3, 11)]),
        (20, 10, 4, [(0, 10), (4, 14), (8, 18), (12, 20)]),
        (12, 5, 99, [(0, 5), (5, 10), (10, 12)]),  # a stride over the room would leave gaps
    ],
)
def test_spans(tokens: int, room: int, stride: int, expected: list[tuple[int, int]]) -> None:
    assert window_spans(tokens, room, stride) == expected


def test_most_context_by_hand() -> None:
    # Token 3 has 3 to its left in the first window (of 0-4: 1 to its right), so 1; 0 to its left in the second (3-7).
    # Token 4: 0 in the first, min(1, 3) in the second.
    first, second = most_context([(0, 5), (3, 8)])
    assert first.tolist() == [True, True, True, True, False]
    assert second.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize("tokens, room, stride", [(40, 12, 5), (37, 9, 9), (100, 30, 7)])
def test_every_token_is_at_its_best_once(tokens: int, room: int, stride: int) -> None:
    spans = window_spans(tokens, room, stride)
    times = np.zeros(tokens, dtype=int)
    for (first, last), best in zip(spans, most_context(spans), strict=True):
        times[first:last] += best
    assert (times == 1).all()


def test_a_long_text(tmp_path: Path) -> None:
    text = "It was quiet. " * 6 + "Ada lives in Rome. " + "Then it was quiet. " * 6
    source = questions(tmp_path, paragraph(text, ("1", "Where does Ada live?", "Rome")))
    tokenizer = small_tokenizer()
    found = tokenise(source, tokenizer, WindowSize(24, 8, 10), training=True)
    windows = found.windows
    tokens = tokenizer.tokenize(text)
    question = tokenizer.tokenize("Where does Ada live?")
    assert question == ["where", "does", "ada", "live", "?"]
    holding = []
    for window in range(len(found.lengths)):
        length, start = int(windows.lengths[window]), int(windows.text_starts[window])
        pieces = tokenizer.convert_ids_to_tokens(windows.input_ids[window].tolist())
        first = int(found.first_tokens[window])
        assert pieces[:length] == ["[CLS]", *question, "[SEP]", *tokens[first : first + length - start - 1], "[SEP]"]
        assert set(pieces[length:]) <= {"[PAD]"}
        places = (int(windows.starts[window]), int(windows.ends[window]))
        if places != (0, 0):
            holding.append(window)
            begin, end = found.offsets[0][first + places[0] - start, 0], found.offsets[0][first + places[1] - start, 1]
            assert text[begin:end] == "Rome"
        else:
            assert "rome" not in pieces
    assert 1 < len(holding) < len(found.lengths)
    assert (found.first_tokens == 8 * np.arange(len(found.lengths))).all()
    inputs = windows.inputs(torch.tensor([0]), 24)
    assert inputs["token_type_ids"][0].tolist() == [0] * 7 + [1] * 17
    assert inputs["attention_mask"].sum() == windows.lengths[0]


def test_what_a_batch_is_padded_to(tmp_path: Path) -> None:
    source = questions(tmp_path, *(paragraph("ada " * n, (str(n), "where ?", "ada")) for n in (2, 20)))
    windows = tokenise(source, small_tokenizer(), WindowSize(64, 8, 10), training=True).windows
    assert windows.input_ids.shape == (2, 25)  # no wider than the longest
    inputs = windows.inputs(torch.tensor([0]), int(windows.lengths[0]))
    assert {name: tuple(each.shape) for name, each in inputs.items()} == dict.fromkeys(inputs, (1, 8))
    assert inputs["attention_mask"][0].tolist() == [1] * 7 + [0]
    assert windows.inputs(torch.tensor([0, 1]), 25)["input_ids"].shape == (2, 25)


def test_an_answer_within_a_word_and_with_accents(tmp_path: Path) -> None:
    text = "In Zürich's lanes Ada lives."
    source = questions(tmp_path, paragraph(text, ("1", "Where?", "Zürich"), ("2", "Who?", "da")))
    found = tokenise(source, small_tokenizer(), WindowSize(64, 8, 10), training=True)
    for window, expected in ((0, "Zürich"), (1, "da")):
        start, end = (
            int(each[window] - found.windows.text_starts[window]) for each in (found.windows.starts, found.windows.ends)
        )
        covered = text[found.offsets[0][start, 0] : found.offsets[0][end, 1]]
        assert expected in covered
        assert "'" not in covered


def test_what_is_counted_and_left_out(tmp_path: Path) -> None:
    good = paragraph("Ada lives in Rome.", ("1", "Where does Ada live in the long long long long run?", "Rome"))
    moved = paragraph("Bo lives in Oslo.", ("2", "Where?", "Oslo"))
    moved["qas"][0]["answers"][0]["answer_start"] -= 1
    empty = {"context": " \n", "qas": [{"id": "3", "question": "?", "answers": [{"text": "x", "answer_start": 0}]}]}
    source = questions(tmp_path, good, moved, empty)
    tokenizer = small_tokenizer()
    training = tokenise(source, tokenizer, WindowSize(32, 8, 6), training=True)
    assert training.questions.tolist() == [0]
    assert training.without_window == [1, 2]
    assert training.cut_questions == 1
    assert int(training.windows.text_starts[0]) == 8
    # To be answered, a question needs a text and nothing else.
    predicting = tokenise(source, tokenizer, WindowSize(32, 8, 6), training=False)
    assert predicting.questions.tolist() == [0, 1]
    assert predicting.without_window == [2]
    source.items[:] = source.items[1:]
    with pytest.raises(InputError, match="none of 2 questions can be used"):
        tokenise(source, tokenizer, WindowSize(32, 8, 6), training=True)


def test_a_window_without_room() -> None:
    WindowSize(14, 8, 10)
    with pytest.raises(InputError, match=r"--max-length 13 leaves no space .* --max-question-length 10"):
        WindowSize(13, 8, 10)
