"""Training examples: sentence pairs with next-sentence labels and dynamic masks (Devlin et al. 2019).

Every random choice comes from a generator seeded by the example's place in the run, so that a batch is a pure
function of (seed, phase, step): any number of ranks and any accumulation sees the same global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from transformers import BertTokenizerFast

from ds_vrgd_recipes.bert.store import Chunks, Split, Tokens

MASKED_FRACTION = 0.15
IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy skips it

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens, and the ordinary ids a masked token may be replaced by."""

    pad: int
    cls: int
    sep: int
    mask: int
    ordinary: npt.NDArray[np.int64] = field(repr=False)

    @classmethod
    def of(cls, tokenizer: BertTokenizerFast) -> SpecialIds:
        """Read the ids from a BERT tokenizer."""
        pad, cls_, sep, mask = tokenizer.convert_tokens_to_ids(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
        return cls(pad, cls_, sep, mask, np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids))


@dataclass(frozen=True)
class ExampleBuilder:
    """Builds examples of one sequence length from one split.

    Attributes:
        chunks: sentence ranges of that length, see ``store.chunk_spans``, from at least two documents.
    """

    split: Split
    chunks: Chunks
    sequence_length: int
    ids: SpecialIds

    def batch(self, chunks: list[int], keys: Sequence[tuple[int, ...]]) -> Batch:
        """Build the examples of the given chunks; ``keys[i]`` seeds all random choices of example i.

        Returns:
            int64 tensors: input_ids, token_type_ids, attention_mask, labels, each [examples, sequence_length], and
            next_sentence_label [examples] (0: B follows A, 1: B is from another document).
        """
        rows = [self._example(chunk, np.random.default_rng(key)) for chunk, key in zip(chunks, keys, strict=True)]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}

    def _example(self, chunk: int, rng: np.random.Generator) -> dict[str, npt.NDArray[np.int64]]:
        first, second, is_random = self._pair(chunk, rng)
        first, second = truncate_pair(first, second, self.sequence_length - 3, rng)
        ids = self.ids
        used = len(first) + len(second) + 3
        input_ids = np.full(self.sequence_length, ids.pad, dtype=np.int64)
        input_ids[:used] = np.concatenate([[ids.cls], first, [ids.sep], second, [ids.sep]])
        token_type_ids = np.zeros_like(input_ids)
        token_type_ids[len(first) + 2 : used] = 1
        attention_mask = np.zeros_like(input_ids)
        attention_mask[:used] = 1
        words = np.delete(np.arange(used), [0, len(first) + 1, used - 1])
        labels = mask_tokens(input_ids, words, ids, rng)
        return {
            "input_ids": input_ids,
            "token_type_ids": token_type_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "next_sentence_label": np.array(is_random, dtype=np.int64),
        }

    def _pair(self, chunk: int, rng: np.random.Generator) -> tuple[Tokens, Tokens, bool]:
        """Return segments A and B, the chunk cut at a random sentence; B is replaced half of the time."""
        begin, end = self.chunks[chunk]
        cut = int(rng.integers(begin + 1, end))
        first = self.split.span(begin, cut)
        if rng.random() < 0.5:
            return first, self.split.span(cut, end), False
        return first, self._other_document(begin, self.sequence_length - 3 - len(first), rng), True

    def _other_document(self, sentence: int, length: int, rng: np.random.Generator) -> Tokens:
        """Return at least ``length`` tokens, if there are so many, from a random sentence of another document on."""
        begin, end = self.split.document_of(sentence)
        start = int(rng.integers(self.split.sentences - (end - begin)))
        if start >= begin:
            start += end - begin
        return self.split.passage(start, length)


def truncate_pair(first: Tokens, second: Tokens, length: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Shorten two segments to ``length`` tokens together, the longer one first, from either end at random.

    The result is that of BERT's loop: drop one token of the longer segment, from the front or the back with equal
    probability, until the pair fits.
    """
    excess = len(first) + len(second) - length
    if excess <= 0:
        return first, second
    longer_first = len(first) >= len(second)
    from_longer = min(excess, abs(len(first) - len(second)))
    rest = excess - from_longer
    cuts = [rest // 2, rest // 2]
    # An odd token comes off the second segment of an equal pair.
    cuts[1] += rest % 2
    cuts[0 if longer_first else 1] += from_longer
    return _trim(first, cuts[0], rng), _trim(second, cuts[1], rng)


def _trim(tokens: Tokens, count: int, rng: np.random.Generator) -> Tokens:
    front = int(rng.binomial(count, 0.5))
    return tokens[front : len(tokens) - (count - front)]


def mask_tokens(
    input_ids: npt.NDArray[np.int64], words: npt.NDArray[np.int64], ids: SpecialIds, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Choose 15 % of the positions ``words``, at least one, and hide them in ``input_ids``, which is changed.

    Of the chosen, 80 % become [MASK], 10 % a random ordinary token, 10 % stay.

    Returns:
        labels: the original ids at the chosen positions, IGNORED_LABEL elsewhere; the shape of ``input_ids``.
    """
    count = max(1, round(MASKED_FRACTION * len(words)))
    chosen = rng.choice(words, size=count, replace=False)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    labels[chosen] = input_ids[chosen]
    draw = rng.random(count)
    input_ids[chosen[draw < 0.8]] = ids.mask
    randomised = chosen[(draw >= 0.8) & (draw < 0.9)]
    input_ids[randomised] = rng.choice(ids.ordinary, size=len(randomised))
    return labels


@lru_cache(maxsize=2)  # a batch may end one pass over the data and begin the next
def epoch_order(chunks: int, key: tuple[int, ...]) -> npt.NDArray[np.uint32]:
    """Return a random order of all chunks for one pass over the data, seeded by ``key``."""
    return np.random.default_rng(key).permutation(np.arange(chunks, dtype=np.uint32))
