"""Sentence pairs and masks: form, proportions and their independence of everything but the seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ds_vrgd_recipes.bert.examples import (
    IGNORED_LABEL,
    Batch,
    ExampleBuilder,
    SpecialIds,
    epoch_order,
    mask_tokens,
    truncate_pair,
)
from ds_vrgd_recipes.bert.prepared import PreparedData

LENGTH = 32


@pytest.fixture(scope="module")
def builder(data: PreparedData) -> ExampleBuilder:
    return ExampleBuilder(data.train, data.chunks["train", LENGTH], LENGTH, SpecialIds.of(data.tokenizer))


@pytest.fixture(scope="module")
def many(builder: ExampleBuilder) -> Batch:
    chunks = [index % len(builder.chunks) for index in range(3000)]
    return builder.batch(chunks, [(index,) for index in range(3000)])


def originals(batch: Batch) -> torch.Tensor:
    """Token ids before masking."""
    return torch.where(batch["labels"] == IGNORED_LABEL, batch["input_ids"], batch["labels"])


def test_form_of_a_pair(builder: ExampleBuilder, many: Batch) -> None:
    ids = builder.ids
    for row, types, attention in zip(originals(many), many["token_type_ids"], many["attention_mask"], strict=True):
        used = int(attention.sum())
        assert attention.tolist() == [1] * used + [0] * (LENGTH - used)
        assert row[0] == ids.cls
        first, last = (row == ids.sep).nonzero().flatten().tolist()
        assert last == used - 1
        assert 1 < first < last - 1  # neither segment is empty
        assert types.tolist() == [0] * (first + 1) + [1] * (last - first) + [0] * (LENGTH - used)
        assert (row[used:] == ids.pad).all()


def test_fifteen_percent_are_masked_80_10_10(builder: ExampleBuilder, many: Batch) -> None:
    chosen = many["labels"] != IGNORED_LABEL
    words = many["attention_mask"].sum() - 3 * len(chosen)
    # 29 words give round(0.15 * 29) = 4 masks, so the fraction is 0.15 only about: 4/29 = 0.138
    assert chosen.sum() / words == pytest.approx(0.15, abs=0.015)
    per_row = chosen.sum(dim=1)
    expected = ((many["attention_mask"].sum(dim=1) - 3) * 0.15).round().clamp(min=1)
    assert (per_row - expected).abs().max() <= 1e-6
    inputs, labels = many["input_ids"][chosen], many["labels"][chosen]
    masked = inputs == builder.ids.mask
    kept = inputs == labels
    # about 12,000 choices: four standard deviations are 1.5 % and 1.1 %
    assert masked.float().mean() == pytest.approx(0.8, abs=0.015)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.012)
    assert not torch.isin(inputs[~masked], torch.tensor([builder.ids.pad, builder.ids.cls, builder.ids.sep])).any()


def test_half_of_the_pairs_are_random_and_from_another_document(builder: ExampleBuilder, many: Batch) -> None:
    # 3,000 fair coins: four standard deviations are 3.7 %
    assert many["next_sentence_label"].float().mean() == pytest.approx(0.5, abs=0.037)
    joined = " ".join(str(token) for shard in builder.split.shards for token in shard.tokens.tolist())
    rows = originals(many)
    for index in range(300):
        sep = int((rows[index] == builder.ids.sep).nonzero()[0])
        last = int(many["attention_mask"][index].sum()) - 1
        first, second = rows[index, 1:sep].tolist(), rows[index, sep + 1 : last].tolist()
        begin, end = builder.chunks[index % len(builder.chunks)]
        chunk = builder.split.span(begin, end).tolist()
        here = " " + " ".join(map(str, chunk)) + " "
        assert f" {' '.join(map(str, first))} " in here
        assert (f" {' '.join(map(str, second))} " in here) == (many["next_sentence_label"][index] == 0)
        assert f" {' '.join(map(str, second))} " in f" {joined} "


def test_another_document_is_drawn_evenly_by_sentence(builder: ExampleBuilder) -> None:
    """The sentences of the own document are never drawn, all others are."""
    begin, end = builder.split.document_of(20)
    own = builder.split.span(begin, end).tolist()
    rng = np.random.default_rng(0)
    starts = set()
    for _ in range(4000):
        drawn = builder._other_document(begin, 5, rng)
        assert len(drawn) >= 1
        assert drawn.tolist() != own[: len(drawn)]
        starts.add(drawn.tobytes())
    sentences = builder.split.sentences - (end - begin)
    assert len(starts) >= 0.95 * sentences  # 4,000 draws from about 380 sentences miss next to none


def test_examples_depend_on_their_key_alone(builder: ExampleBuilder) -> None:
    alone = builder.batch([5], [(1, 2)])
    among = builder.batch([4, 5, 6], [(9, 9), (1, 2), (9, 8)])
    assert all(torch.equal(alone[name][0], among[name][1]) for name in alone)
    other_key = builder.batch([5], [(1, 3)])
    assert not torch.equal(alone["input_ids"], other_key["input_ids"])  # masks are drawn anew


@pytest.mark.parametrize("lengths", [(3, 4), (10, 2), (2, 10), (8, 8), (9, 8), (30, 29)])
def test_truncation_is_that_of_berts_loop(lengths: tuple[int, int]) -> None:
    """Lengths as by dropping one token at a time of the longer segment, of B when they are equal."""
    first, second = np.arange(lengths[0]), 100 + np.arange(lengths[1])
    expected = list(lengths)
    while sum(expected) > 11:
        expected[0 if expected[0] > expected[1] else 1] -= 1
    rng = np.random.default_rng(0)
    cut = [truncate_pair(first, second, 11, rng) for _ in range(200)]
    assert {(len(a), len(b)) for a, b in cut} == {tuple(expected)}
    assert all((np.diff(a) == 1).all() and (np.diff(b) == 1).all() for a, b in cut)  # only from the ends
    dropped = lengths[0] - expected[0]
    # each dropped token is a fair coin between front and back
    assert np.mean([a[0] for a, _ in cut]) == pytest.approx(dropped / 2, abs=0.4 * max(1, dropped) ** 0.5)


def test_at_least_one_token_is_masked() -> None:
    ids = SpecialIds(pad=0, cls=2, sep=3, mask=4, ordinary=np.arange(5, 9))
    inputs = np.array([2, 5, 3, 6, 3])
    labels = mask_tokens(inputs, np.array([1, 3]), ids, np.random.default_rng(0))
    assert (labels != IGNORED_LABEL).sum() == 1
    assert labels[[0, 2, 4]].tolist() == [IGNORED_LABEL] * 3


def test_epoch_order_is_a_permutation_by_key() -> None:
    assert sorted(epoch_order(50, (1, 2)).tolist()) == list(range(50))
    assert epoch_order(50, (1, 2)).tolist() != epoch_order(50, (1, 3)).tolist()
