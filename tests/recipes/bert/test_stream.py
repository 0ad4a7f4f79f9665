"""One global batch for any number of ranks, equal steps on all, and resumption in mid-phase."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from ds_vrgd_recipes.bert.examples import Batch, ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.prepared import PreparedData
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.bert.stream import MicroBatches, RankOrder, evaluation_batches, training_batches


def builder(data: PreparedData, split: str, length: int) -> ExampleBuilder:
    documents = data.train if split == "train" else data.held_out
    return ExampleBuilder(documents, data.chunks[split, length], length, SpecialIds.of(data.tokenizer))


@pytest.fixture(scope="module")
def micro_batches(data: PreparedData, run: RunFile) -> MicroBatches:
    phase = run.phases[0].model_copy(update={"steps": 40})
    return MicroBatches(builder(data, "train", phase.sequence_length), run.seed, 0, phase)


def global_batches(micro_batches: MicroBatches, ranks: int, first_step: int = 0) -> list[list[Batch]]:
    """Micro-batches of each update in the order of the global batch, put together from all ranks."""
    phase = micro_batches.phase
    accumulation = phase.accumulation_steps(ranks)
    streams = [
        list(training_batches(micro_batches, RankOrder(phase, first_step, rank, ranks), workers=0))
        for rank in range(ranks)
    ]
    assert {len(stream) for stream in streams} == {(phase.steps - first_step) * accumulation}
    return [
        [streams[rank][step * accumulation + turn] for turn in range(accumulation) for rank in range(ranks)]
        for step in range(phase.steps - first_step)
    ]


def same(a: list[Batch], b: list[Batch]) -> bool:
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_split_sees_the_same_chunks(micro_batches: MicroBatches, ranks: int) -> None:
    alone, split = global_batches(micro_batches, 1), global_batches(micro_batches, ranks)
    assert len(alone) == 40
    assert all(same(a, b) for a, b in zip(alone, split, strict=True))


def test_resuming_in_mid_phase_goes_on_where_it_stopped(micro_batches: MicroBatches) -> None:
    whole, rest = global_batches(micro_batches, 2), global_batches(micro_batches, 2, first_step=31)
    assert all(same(a, b) for a, b in zip(whole[31:], rest, strict=True))


class ChunkNumbers:
    """In the place of an ExampleBuilder: examples of one token, the number of their chunk."""

    chunks = range(145)  # no multiple of the global batch

    def batch(self, chunks: list[int], keys: Sequence[tuple[int, ...]]) -> Batch:
        assert len(set(keys)) == len(chunks)
        ids = torch.tensor(chunks)[:, None]
        zeros = torch.zeros_like(ids)
        return {
            "input_ids": ids,
            "token_type_ids": zeros,
            "attention_mask": zeros + 1,
            "labels": zeros,
            "next_sentence_label": zeros[:, 0],
        }


def test_no_example_twice_or_left_out_when_ranks_come_and_go(run: RunFile) -> None:
    """The saved position is the update alone: 3 ranks, stopped and resumed with 3, then 2, 6 and 1."""
    phase = run.phases[0].model_copy(update={"global_batch": 12, "micro_batch": 2, "steps": 40})
    micro_batches = MicroBatches(cast(ExampleBuilder, ChunkNumbers()), run.seed, 0, phase)
    seen: list[int] = []
    per_step = []
    for ranks, first, last in ((3, 0, 7), (3, 7, 13), (2, 13, 20), (6, 20, 31), (1, 31, 40)):
        streams = [
            iter(training_batches(micro_batches, RankOrder(phase, first, rank, ranks), workers=0))
            for rank in range(ranks)
        ]
        for _ in range(first, last):
            step = [next(stream)["input_ids"] for _ in range(phase.accumulation_steps(ranks)) for stream in streams]
            per_step.append(len(step) * len(step[0]))
            seen += torch.cat(step).tolist()
    assert per_step == [12] * 40
    for epoch in range(3):
        assert sorted(seen[145 * epoch : 145 * (epoch + 1)]) == list(range(145))
    assert len(set(seen[435:])) == 480 - 435  # the rest of the fourth pass
    alone = training_batches(micro_batches, RankOrder(phase, 0, 0, 1), workers=0)
    assert torch.cat([batch["input_ids"] for batch in alone]).tolist() == seen


def test_workers_change_nothing(micro_batches: MicroBatches) -> None:
    order = RankOrder(micro_batches.phase, 36, 0, 1)
    assert len(order) == 4 * 8
    here = list(training_batches(micro_batches, order, workers=0))
    assert same(here, list(training_batches(micro_batches, order, workers=2)))


def test_each_pass_takes_every_chunk_once_in_a_new_order(micro_batches: MicroBatches) -> None:
    chunks = len(micro_batches.builder.chunks)
    first = [micro_batches._chunk(position) for position in range(chunks)]
    second = [micro_batches._chunk(position) for position in range(chunks, 2 * chunks)]
    assert sorted(first) == sorted(second) == list(range(chunks))
    assert first != second


def test_phases_and_seeds_draw_differently(micro_batches: MicroBatches) -> None:
    first = micro_batches[0, 0]["input_ids"]
    for changes in ({"phase_index": 1}, {"seed": 4}):
        settings = {**vars(micro_batches), **changes}
        assert not torch.equal(MicroBatches(**settings)[0, 0]["input_ids"], first)


def labelled_examples(batch: Batch) -> list[tuple[int, ...]]:
    """Tokens and labels of each example of a packed batch that has any labels."""
    found = []
    for begin, end in itertools.pairwise(batch["starts"].tolist()):
        inside = (batch["masked_positions"] >= begin) & (batch["masked_positions"] < end)
        if inside.any():
            found.append((*batch["input_ids"][begin:end].tolist(), *batch["labels"][inside].tolist()))
    return found


@pytest.mark.parametrize("sequences", [7, 30, 10_000])
def test_evaluation_covers_the_same_examples_with_equal_batches(data: PreparedData, sequences: int) -> None:
    held_out = builder(data, "held_out", 32)

    def rows(ranks: int) -> set[tuple[int, ...]]:
        shares = [list(evaluation_batches(held_out, sequences, 4, rank, ranks)) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        batches = [batch for share in shares for batch in share]
        assert {len(batch["next_sentence_label"]) for batch in batches} == {4}
        examples = [example for batch in batches for example in labelled_examples(batch)]
        assert len(examples) == min(sequences, len(held_out.chunks))
        return set(examples)

    assert rows(1) == rows(3) == rows(5)
