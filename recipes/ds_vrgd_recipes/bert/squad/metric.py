"""Exact match and F1 as SQuAD v1.1 defines them (Rajpurkar et al. 2016, section 6; its evaluation script)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


@dataclass(frozen=True)
class Scores:
    """Means over all questions, in percent."""

    exact_match: float
    f1: float


def normalise(answer: str) -> str:
    """Return lower case without ASCII punctuation, then without articles, words one blank apart."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, truth: str) -> float:
    """Return 1 if both are the same after ``normalise``, else 0."""
    return float(normalise(prediction) == normalise(truth))


def f1(prediction: str, truth: str) -> float:
    """Return the harmonic mean of precision and recall over the words of both, each as often as it occurs."""
    predicted, true = normalise(prediction).split(), normalise(truth).split()
    shared = sum((Counter(predicted) & Counter(true)).values())
    return 2 * shared / (len(predicted) + len(true)) if shared else 0.0


def score(truths: Mapping[str, Sequence[str]], predictions: Mapping[str, str]) -> Scores:
    """Score the predictions, each against the truth that favours it most.

    Args:
        truths: acceptable answers by question id; every question counts.
        predictions: answer by question id; a question without one scores 0.
    """
    matches, overlaps = 0.0, 0.0
    for name, accepted in truths.items():
        if name in predictions:
            matches += max(exact_match(predictions[name], truth) for truth in accepted)
            overlaps += max(f1(predictions[name], truth) for truth in accepted)
    return Scores(100.0 * matches / len(truths), 100.0 * overlaps / len(truths))
