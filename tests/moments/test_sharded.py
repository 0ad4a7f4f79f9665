"""The exchange on one, two and three ranks, against plain sums over the gradients of all ranks in float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments import ShardedMoments, buckets, store
from ds_vrgd.moments.chan import merge_chunks_
from tests.moments.exchange import (
    CASES,
    MIXED,
    SHAPES,
    TRANSPOSED,
    Case,
    Check,
    check,
    failures_of,
    gradient,
    make,
    observe,
)
from tests.support.ranks import run_on_ranks


def plain_window(case: Case, rank: int, world: int) -> None:
    """Two windows; the first must leave nothing in the second."""
    model, moments = make(case, rank, world)
    for window in (0, 1):
        observe(case, model, moments, rank, window)
        check(case, model, moments, rank, world, window)
        moments.reset()
        assert moments.finish() == 0


def routing_changes_no_bit(case: Case, rank: int, world: int) -> None:
    """Bucket size and order of arrival change no bit."""
    found = []
    variants = (
        case,
        replace(case, bucket=1, shuffled=True),
        replace(case, bucket=10_000, in_flight=1),
        replace(case, bucket=10_000, take=True),
    )
    for variant in variants:
        model, moments = make(variant, rank, world)
        observe(variant, model, moments, rank, 0)
        moments.finish()
        of_variant = moments.moments(model.shards[0])
        found.append((of_variant.mean, of_variant.m2))
    for mean, m2 in found[1:]:
        assert torch.equal(mean, found[0][0])
        assert torch.equal(m2, found[0][1])


def twice_in_a_micro_batch_is_one_chunk(case: Case, rank: int, world: int) -> None:
    """Two gradients of one parameter before its bucket has left are summed: halves make the whole."""
    case = replace(case, bucket=10_000)
    model, moments = make(case, rank, world)
    for micro_batch in range(case.micro_batches):
        for index in (0, *range(len(SHAPES))):
            grad = gradient(case, 0, rank, micro_batch, index)
            moments.add(model.params[index], grad / 2 if index == 0 else grad)
        moments.end_micro_batch()
    check(case, model, moments, rank, world, 0)


def twice_after_the_exchange_is_refused(case: Case, rank: int, world: int) -> None:
    """A second gradient that comes when the first has left cannot be summed any more."""
    case = replace(case, bucket=1)
    model, moments = make(case, rank, world)
    moments.add(model.params[0], gradient(case, 0, rank, 0, 0))
    with pytest.raises(RuntimeError, match=r"'p0' arrived twice.*use_reentrant=False"):
        moments.add(model.params[0], gradient(case, 0, rank, 0, 0))
    moments.reset()
    observe(case, model, moments, rank, 1)
    check(case, model, moments, rank, world, 1)


def a_broken_off_window_leaves_nothing(case: Case, rank: int, world: int) -> None:
    """Infinities, a backward pass that stops half-way, a reset: the next window is right."""
    model, moments = make(case, rank, world)
    for index, param in enumerate(model.params):
        moments.add(param, torch.full_like(gradient(case, 0, rank, 0, index), torch.inf))
    moments.end_micro_batch()
    for index in (0, 1, 2, 5):
        moments.add(model.params[index], torch.full_like(gradient(case, 0, rank, 0, index), torch.nan))
    moments.reset()
    assert moments.finish() == 0
    observe(case, model, moments, rank, 1)
    check(case, model, moments, rank, world, 1)


def a_shard_that_was_not_routed_is_zero(case: Case, rank: int, world: int) -> None:
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    moments.finish()
    of_shard = moments.moments(torch.full((5,), torch.nan))
    mean, m2 = of_shard.mean, of_shard.m2
    assert mean.tolist() == m2.tolist() == [0.0] * 5


def moments_live_as_long_as_the_window(case: Case, rank: int, world: int) -> None:
    """They are the same tensors during the whole window; after it nobody holds them."""
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    moments.finish()
    first, again = moments.moments(model.shards[0]), moments.moments(model.shards[0])
    assert again.total is first.total
    assert again.m2 is first.m2
    alive = [weakref.ref(first.total), weakref.ref(first.m2)]
    moments.reset()
    del first, again
    assert [ref() for ref in alive] == [None, None]


def taking_changes_no_bit(case: Case, rank: int, world: int) -> None:
    """Gradients that are kept count as those that are copied; a second one is added, and not in place."""
    found = []
    for take in (False, True):
        case = replace(case, bucket=10_000, dtypes=MIXED)
        model, moments = make(case, rank, world)
        for micro_batch in range(2):
            for turn, index in enumerate((0, TRANSPOSED, 3, *range(len(SHAPES)))):
                grad = gradient(case, 0, rank, micro_batch, index)
                before = grad.clone()
                mixed = (turn, micro_batch) in ((1, 0), (5, 1))  # one copied, one kept, in either order
                moments.add(model.params[index], grad, keep=take and not mixed)
                assert torch.equal(grad, before)
            moments.end_micro_batch()
        moments.finish()
        found.append(moments.moments(model.shards[0]))
    assert torch.equal(found[0].total, found[1].total)
    assert torch.equal(found[0].m2, found[1].m2)


def strided_copies_change_nothing(case: Case, rank: int, world: int) -> None:
    """Among many ranks, equal slots travel as one strided block."""
    few = buckets.FEW_PEERS
    buckets.FEW_PEERS = 1
    try:
        for take in (False, True):
            plain_window(replace(case, take=take), rank, world)
        twice_in_a_micro_batch_is_one_chunk(case, rank, world)
    finally:
        buckets.FEW_PEERS = few


def what_a_broken_off_bucket_wrote_is_cleared(case: Case, rank: int, world: int) -> None:
    """A buffer that a broken-off window has written to serves other buckets, whose padding is zero all the same."""
    case = replace(case, bucket=1)
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    moments.reset()
    for _ in range(4):
        moments.add(model.params[5], torch.full(SHAPES[5], torch.nan))
        moments.reset()
    observe(case, model, moments, rank, 1)
    check(case, model, moments, rank, world, 1)


def neighbours_are_merged_at_once(case: Case, rank: int, world: int) -> None:
    """Gradients come in the reverse of the shard's order, and are merged as one piece."""
    case = replace(case, bucket=10_000, gap=0)
    model, _ = make(case, rank, world)
    moments = ShardedMoments(model.routes[::-1], torch.distributed.group.WORLD, case.bucket)
    pieces: list[int] = []

    def counting(received: Tensor, total: Tensor, m2: Tensor, parts: int) -> None:
        pieces.append(len(total))
        merge_chunks_(received, total, m2, parts)

    store.merge_chunks_ = counting
    try:
        observe(case, model, moments, rank, 0)
    finally:
        store.merge_chunks_ = merge_chunks_
    assert len(pieces) == case.micro_batches
    check(case, model, moments, rank, world, 0)


def a_dropped_gradient_counts_as_zero(case: Case, rank: int, world: int) -> None:
    """The gradients of a parameter before it was dropped are zero, as if it had taken no part; the others stay."""
    case = replace(case, missing=((None, 0, 5), (None, 0, 0)))
    model, moments = make(case, rank, world)
    for micro_batch in range(case.micro_batches):
        for index, param in enumerate(model.params):
            moments.add(param, gradient(case, 0, rank, micro_batch, index))
        if micro_batch == 0:
            moments.drop(model.params[0])  # while the micro-batch is open
        moments.end_micro_batch()
        if micro_batch == 0:
            moments.finish()
            moments.drop(model.params[5])
    check(case, model, moments, rank, world, 0)


def detaching_releases_all_memory(case: Case, rank: int, world: int) -> None:
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    assert min(moments.held_bytes()) > 0
    moments.before_first_bucket = lambda: None
    moments.detach()
    assert moments.held_bytes() == (0, 0)
    assert moments.before_first_bucket is None


def few_buffers_serve_all_buckets(case: Case, rank: int, world: int) -> None:
    """Whatever order they finish in, gradients that are kept wait for their turn where they are."""
    case = replace(case, bucket=1, take=True, shuffled=True)
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    assert len(moments._buckets) >= len(SHAPES) - 1
    assert sorted(len(spare) for spare in moments._spare.values()) == ([3] if world == 1 else [2, 3])


SPECIAL: tuple[Check, ...] = (
    routing_changes_no_bit,
    twice_in_a_micro_batch_is_one_chunk,
    twice_after_the_exchange_is_refused,
    a_broken_off_window_leaves_nothing,
    a_shard_that_was_not_routed_is_zero,
    moments_live_as_long_as_the_window,
    taking_changes_no_bit,
    strided_copies_change_nothing,
    what_a_broken_off_bucket_wrote_is_cleared,
    neighbours_are_merged_at_once,
    few_buffers_serve_all_buckets,
    a_dropped_gradient_counts_as_zero,
    detaching_releases_all_memory,
)


def all_cases() -> Iterator[tuple[str, Check, Case]]:
    for name, case in CASES.items():
        yield name, plain_window, case
    for function in SPECIAL:
        for cut in ("runs", "slots"):
            yield f"{cut}-{function.__name__}", function, Case(cut)


def on_rank(rank: int, world: int) -> dict[str, str]:
    return failures_of(all_cases(), rank, world)


@pytest.fixture(scope="module", params=[1, 2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Return the failures of every rank; all cases of a world in one spawn."""
    return run_on_ranks(request.param, on_rank, request.param)


@pytest.mark.parametrize("name", [name for name, _, _ in all_cases()])
def test_exchange(failures: list[dict[str, str]], name: str) -> None:
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if name in of_rank]
    assert not failed, "\n".join(failed)
