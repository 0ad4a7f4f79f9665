"""Sentence boundaries by example."""

from __future__ import annotations

import pytest

from ds_vrgd_recipes.bert.sentences import LONGEST_SENTENCE, cut_sentence, split_sentences


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        (
            "Mr. Smith met J. R. Jones in the U.S. Senate. He left.",
            ["Mr. Smith met J. R. Jones in the U.S. Senate.", "He left."],
        ),
        ('He asked: "Is it so?" Then (perhaps.) She left.', ['He asked: "Is it so?"', "Then (perhaps.)", "She left."]),
        ("It cost 3.50 dollars. 12 men paid.", ["It cost 3.50 dollars.", "12 men paid."]),
        ("no capital. after the stop", ["no capital. after the stop"]),
        ("one  line\nanother\t line\n\n", ["one line", "another line"]),
        ("Said \u201cyes.\u201d \u201cNo,\u201d said I.", ["Said \u201cyes.\u201d", "\u201cNo,\u201d said I."]),
        (" \n ", []),
    ],
)
def test_split(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


def test_nothing_is_lost() -> None:
    text = "Gen. A. Lee vs. Capt. Poe... Who won? No. 5 etc. etc. The end."
    assert " ".join(split_sentences(text)) == text


def test_sentences_without_end_are_cut_at_white_space_if_there_is_some() -> None:
    words = "word " * 5000 + "x" * 20_000
    pieces = cut_sentence(words)
    assert all(len(piece) <= LONGEST_SENTENCE for piece in pieces)
    assert " ".join(pieces[:3]) == ("word " * 4914).strip()  # 1638 words of 5 characters fill 8,190
    assert "".join(pieces).replace(" ", "") == words.replace(" ", "")
    assert cut_sentence("short") == ["short"]
