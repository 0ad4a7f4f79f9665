"""Splitting English text into sentences."""

from __future__ import annotations

import re

# A sentence ends at . ! or ?, with any closing quotes or brackets, before white space and an opening capital,
# digit or quote.
_BOUNDARY = re.compile(r"[.!?]+[\"'”’)\]]*(\s+)(?=[\"'“‘(\[]?[A-Z0-9])")

# A full stop after these belongs to the word; single capitals (initials, U.S.) are matched by _INITIAL.
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof rev hon gen col capt lt sgt gov sen rep st mt jr sr no vs etc vol fig approx "
    "jan feb mar apr jun jul aug sep sept oct nov dec co inc ltd corp".split()
)
_INITIAL = re.compile(r"(?:^|[\s.(\"'“])[A-Z]$")
_LAST_WORD = re.compile(r"([A-Za-z]+)$")


def split_sentences(text: str) -> list[str]:
    """Sentences of ``text``, white space normalised, in order; nothing is dropped.

    A line break always ends a sentence, so text that already has one sentence a line keeps its sentences.
    """
    sentences: list[str] = []
    for line in text.splitlines():
        start = 0
        for match in _BOUNDARY.finditer(line):
            if line[match.start()] == "." and _is_abbreviation(line[start : match.start()]):
                continue
            sentences.append(line[start : match.start(1)])
            start = match.end()
        sentences.append(line[start:])
    return [normalised for normalised in (" ".join(sentence.split()) for sentence in sentences) if normalised]


def _is_abbreviation(before: str) -> bool:
    """Whether the full stop after ``before`` belongs to an abbreviation or an initial."""
    if _INITIAL.search(before):
        return True
    word = _LAST_WORD.search(before)
    return word is not None and word[1].lower() in _ABBREVIATIONS
