"""Sentence boundaries by example."""

from __future__ import annotations

import pytest

from ds_vrgd.bert.sentences import split_sentences


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
