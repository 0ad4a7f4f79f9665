"""Splitting English text into sentences."""

from __future__ import annotations

import re

# Anything longer is a table, a list or text without full stops; the tokenizer would need gigabytes for 50 MB of it.
LONGEST_SENTENCE = 1 << 13  # characters

# Typographic quotation marks, written as escapes since they look like ASCII ones.
_OPENING = "\"'(\\[\u201c\u2018"
_CLOSING = "\"')\\]\u201d\u2019"

# A sentence ends at . ! or ?, with any closing quotes or brackets, before white space and an opening capital,
# digit or quote.
_BOUNDARY = re.compile(rf"[.!?]+[{_CLOSING}]*(\s+)(?=[{_OPENING}]?[A-Z0-9])")

# A full stop after these, or after a single capital (initials, U.S.), belongs to the word.
_ABBREVIATION = re.compile(
    rf"(?:^|[\s.{_OPENING}])(?:[A-Z]|(?i:"
    r"mr|mrs|ms|dr|prof|rev|hon|gen|col|capt|lt|sgt|gov|sen|rep|st|mt|jr|sr|no|vs|etc|vol|fig|approx|"
    r"jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|co|inc|ltd|corp))$"
)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of ``text`` in order, with white space normalised; nothing is dropped.

    A line break always ends a sentence, so text with one sentence per line keeps its sentences.
    """
    sentences: list[str] = []
    for line in text.splitlines():
        start = 0
        for match in _BOUNDARY.finditer(line):
            if line[match.start()] == "." and _ABBREVIATION.search(line[start : match.start()]):
                continue
            sentences.append(line[start : match.start(1)])
            start = match.end()
        sentences.append(line[start:])
    return [normalised for normalised in (" ".join(sentence.split()) for sentence in sentences) if normalised]


def cut_sentence(sentence: str) -> list[str]:
    """Return the sentence, or pieces of at most LONGEST_SENTENCE characters, cut at white space if possible."""
    pieces = []
    while len(sentence) > LONGEST_SENTENCE:
        cut = sentence.rfind(" ", 1, LONGEST_SENTENCE + 1)
        cut = cut if cut > 0 else LONGEST_SENTENCE
        pieces.append(sentence[:cut])
        sentence = sentence[cut:].lstrip()
    return [*pieces, sentence] if sentence else pieces
