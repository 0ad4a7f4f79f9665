"""F1 and exact match against values computed by hand from their definition."""

from __future__ import annotations

import pytest

from ds_vrgd_recipes.bert.squad.metric import exact_match, f1, normalise, score


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("a an the", ""),
        ("theatre another an-d", "theatre another and"),  # articles are whole words; punctuation goes first
        ("U.S.A.", "usa"),
        ("A.", ""),
        ("«Été»", "«été»"),  # only ASCII punctuation goes
        ("the\tBig\nApple", "big apple"),
        ("the-end", "theend"),
        ("", ""),
    ],
)
def test_normalise(answer: str, expected: str) -> None:
    assert normalise(answer) == expected


@pytest.mark.parametrize(
    "prediction, truth, expected",
    [
        ("the cat", "Cat.", 1.0),
        ("black cat", "cat", 2 * (1 / 2 * 1) / (1 / 2 + 1)),  # precision 1/2, recall 1
        ("a black cat", "black dog sleeps", 2 * (1 / 2 * 1 / 3) / (1 / 2 + 1 / 3)),
        ("no no yes", "no yes yes", 2 / 3),  # with multiplicity: no once, yes once
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 0.0),  # the same when normalised, but no word is shared
    ],
)
def test_f1(prediction: str, truth: str, expected: float) -> None:
    assert f1(prediction, truth) == pytest.approx(expected)


def test_exact_match() -> None:
    assert exact_match("The cat", "cat!") == 1.0
    assert exact_match("cat", "cats") == 0.0
    assert exact_match("the", "a") == 1.0  # both are empty when normalised


def test_each_question_counts_with_the_truth_that_favours_it() -> None:
    truths = {"1": ["black cat", "cat"], "2": ["Rome"], "3": ["Oslo"], "4": ["the big dog", "dogs"]}
    predictions = {"1": "a cat", "2": "Rome, Italy", "4": "dog", "unasked": "x"}
    # F1: 1, 2/3, unanswered 0, 2/3; exact: 1, 0, 0, 0
    scores = score(truths, predictions)
    assert scores.f1 == pytest.approx(100 * (1 + 2 / 3 + 2 / 3) / 4)
    assert scores.exact_match == pytest.approx(25.0)
