"""Whole parameters on every rank, against sums over the stacked chunks in float64."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments import ReplicatedMoments
from tests.support.ranks import run_on_ranks


def gradients(rank: int, micro_batch: int, window: int = 0) -> list[Tensor]:
    """Return gradients of three parameters; the matrix comes transposed, the last is bf16."""
    generator = torch.Generator().manual_seed(1000 * window + 100 * rank + micro_batch)
    a = torch.randn(5, generator=generator)
    b = torch.randn(4, 3, generator=generator).t()
    return [a, b, torch.randn(7, generator=generator).bfloat16()]


def make(group: object = None) -> tuple[list[Tensor], ReplicatedMoments]:
    params = [torch.zeros(5), torch.zeros(3, 4), torch.zeros(7, dtype=torch.bfloat16)]
    return params, ReplicatedMoments(params, group)


def check(moments: ReplicatedMoments, param: Tensor, chunks: Sequence[Tensor]) -> None:
    stacked = torch.stack([chunk.double().flatten() for chunk in chunks])
    mean, m2 = moments.moments(param).mean, moments.moments(param).m2
    assert mean.dtype == m2.dtype == torch.float32
    torch.testing.assert_close(mean.double(), stacked.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(m2.double(), ((stacked - stacked.mean(0)) ** 2).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_accumulation(micro_batches: int) -> None:
    params, moments = make()
    for window in (0, 1):  # the second must see nothing of the first
        for micro_batch in range(micro_batches):
            for param, grad in zip(params, gradients(0, micro_batch, window), strict=True):
                moments.add(param, grad)
                grad.fill_(torch.nan)  # autograd owns it again: it must have been copied
            moments.end_micro_batch()
        assert moments.finish() == micro_batches
        for index, param in enumerate(params):
            check(moments, param, [gradients(0, m, window)[index] for m in range(micro_batches)])
        moments.reset()
        assert moments.finish() == 0
        moments.reset()


def test_a_gradient_that_is_kept_is_left_alone() -> None:
    # what backward of a sum hands to both of its terms is one tensor
    params, grads = [torch.zeros(5), torch.zeros(5)], [gradients(0, m)[0] for m in range(3)]
    moments = ReplicatedMoments(params)
    for grad in grads:
        before = grad.clone()
        for param in params:
            moments.add(param, grad, keep=True)
        moments.end_micro_batch()
        assert torch.equal(grad, before)
    assert moments.finish() == 3
    for param in params:
        check(moments, param, grads)


def test_fp64_parameters_get_fp64_moments() -> None:
    param = torch.zeros(3, dtype=torch.float64)
    moments = ReplicatedMoments([param])
    for value in (1.0, 1.0 + 1e-12):
        moments.add(param, torch.full((3,), value, dtype=torch.float64))
        moments.end_micro_batch()
    assert moments.finish() == 2
    assert moments.moments(param).mean[0].item() == pytest.approx(1.0 + 5e-13, abs=1e-16)
    assert moments.moments(param).m2[0].item() == pytest.approx(5e-25, rel=1e-3)


def test_two_gradients_in_one_micro_batch_are_one_chunk() -> None:
    # a weight shared between reentrant checkpoint segments: 1 + 2 and 3 + 4 are two chunks, 3 and 7
    param = torch.zeros(2)
    moments = ReplicatedMoments([param])
    for first, second in ((1.0, 2.0), (3.0, 4.0)):
        moments.add(param, torch.full((2,), first))
        moments.add(param, torch.full((2,), second))
        moments.end_micro_batch()
    assert moments.finish() == 2
    check(moments, param, [torch.full((2,), 3.0), torch.full((2,), 7.0)])


def test_two_bf16_gradients_are_summed_in_fp32() -> None:
    # 256 + 1 is no bf16 number
    param = torch.zeros(1, dtype=torch.bfloat16)
    moments = ReplicatedMoments([param])
    for value in (256.0, 1.0):
        moments.add(param, torch.tensor([value], dtype=torch.bfloat16))
    moments.end_micro_batch()
    moments.finish()
    assert moments.moments(param).mean.item() == 257.0


@pytest.mark.parametrize("used_in", [{0}, {1}, {3}, {0, 2}, set()])
def test_no_part_in_a_micro_batch_is_a_zero_gradient(used_in: set[int]) -> None:
    params, moments = make()
    for window in (0, 1):
        for micro_batch in range(4):
            for index, grad in enumerate(gradients(0, micro_batch, window)):
                if index != 1 or micro_batch in used_in:
                    moments.add(params[index], grad)
            moments.end_micro_batch()
        assert moments.finish() == 4
        chunks = [gradients(0, m, window)[1] * (m in used_in) for m in range(4)]
        check(moments, params[1], chunks)
        moments.reset()


def test_branches_that_take_turns_leave_no_parameter_in_every_micro_batch() -> None:
    params, moments = make()
    uses = [{0}, {1}, {0, 2}, {1, 2}]
    for micro_batch, used in enumerate(uses):
        for index in used:
            moments.add(params[index], gradients(0, micro_batch)[index])
        moments.end_micro_batch()
    assert moments.finish() == 4
    for index, param in enumerate(params):
        check(moments, param, [gradients(0, m)[index] * (index in used) for m, used in enumerate(uses)])


def test_a_window_begins_with_the_first_chunk_that_was_not_thrown_away() -> None:
    params, moments = make()
    for micro_batch, used in enumerate((0, 1, 2, 1)):
        if micro_batch == 2:  # all that there is so far
            moments.drop(params[0])
            moments.drop(params[1])
        moments.add(params[used], gradients(0, micro_batch)[used])
        moments.end_micro_batch()
    assert moments.finish() == 2
    check(moments, params[0], [torch.zeros(5)] * 2)
    check(moments, params[1], [torch.zeros(3, 4), gradients(0, 3)[1]])
    check(moments, params[2], [gradients(0, 2)[2], torch.zeros(7)])


def test_micro_batches_without_a_gradient_are_counted_where_the_engine_ends_them() -> None:
    params, _ = make()
    moments = ReplicatedMoments(params, counts_all=True)
    for used in (False, True, False):
        if used:
            moments.add(params[0], torch.ones(5))
        moments.end_micro_batch()
    assert moments.finish() == 3
    check(moments, params[0], [torch.zeros(5), torch.ones(5), torch.zeros(5)])


def test_a_broken_off_window_leaves_nothing() -> None:
    params, moments = make()
    for param in params:
        moments.add(param, torch.full_like(param, torch.inf))
    moments.end_micro_batch()
    moments.add(params[0], torch.full_like(params[0], torch.nan))
    moments.reset()
    for micro_batch in range(2):
        for param, grad in zip(params, gradients(0, micro_batch), strict=True):
            moments.add(param, grad)
        moments.end_micro_batch()
    assert moments.finish() == 2
    for index, param in enumerate(params):
        check(moments, param, [gradients(0, m)[index] for m in range(2)])


def test_restart_forgets_one_parameter() -> None:
    params, moments = make()
    moments.drop(params[0])  # before anything was observed
    for micro_batch in range(3):
        for param, grad in zip(params, gradients(0, micro_batch), strict=True):
            if param is params[0] and micro_batch == 1:
                moments.drop(param)
            moments.add(param, grad)
        moments.end_micro_batch()
    moments.finish()
    check(moments, params[0], [torch.zeros(5), *(gradients(0, m)[0] for m in (1, 2))])
    check(moments, params[1], [gradients(0, m)[1] for m in range(3)])


def test_restart_in_an_open_micro_batch() -> None:
    params, moments = make()
    moments.add(params[0], torch.full((5,), torch.nan))
    moments.drop(params[0])  # the backward pass broke off, and the next one begins
    moments.add(params[0], torch.ones(5))
    moments.end_micro_batch()
    assert moments.finish() == 1
    check(moments, params[0], [torch.ones(5)])


@pytest.mark.parametrize("when", ["before the first gradient", "between windows", "inside a window"])
def test_observe_more(when: str) -> None:
    params, moments = make()
    new = torch.zeros(2)
    if when == "before the first gradient":
        moments.observe([*params, new])
    chunks = []
    for micro_batch in range(4):
        if micro_batch == 2 and when != "before the first gradient":
            if when == "between windows":
                moments.finish()
                moments.reset()
                chunks.clear()
            moments.observe([*params, new])
        for param, grad in zip(params, gradients(0, micro_batch), strict=True):
            moments.add(param, grad)
        chunks.append(torch.full((2,), float(micro_batch) * (micro_batch >= 2)))
        if micro_batch >= 2:
            moments.add(new, chunks[-1])
        moments.end_micro_batch()
    assert moments.finish() == len(chunks)
    check(moments, new, chunks)


def test_observe_fewer() -> None:
    params, moments = make()
    for micro_batch in range(2):
        if micro_batch == 1:
            moments.observe(params[1:])
        for param, grad in list(zip(params, gradients(0, micro_batch), strict=True))[micro_batch:]:
            moments.add(param, grad)
        moments.end_micro_batch()
    moments.finish()
    check(moments, params[1], [gradients(0, m)[1] for m in range(2)])
    with pytest.raises(KeyError):
        moments.moments(params[0])


# --- two ranks


def merged(rank: int, world: int) -> None:
    """Chunks of all ranks, and a parameter that one rank does not use at all, and another in one micro-batch only."""
    params, moments = make(torch.distributed.group.WORLD)

    def used(r: int, micro_batch: int, index: int) -> bool:
        return not (index == 1 and r == 0) and not (index == 2 and r == 1 and micro_batch != 1)

    for window in (0, 1):
        for micro_batch in range(3):
            for index, grad in enumerate(gradients(rank, micro_batch, window)):
                if used(rank, micro_batch, index):
                    moments.add(params[index], grad)
            moments.end_micro_batch()
        assert moments.finish() == 3 * world
        assert moments.finish() == 3 * world  # once a window; a second merge would change the moments
        for index, param in enumerate(params):
            chunks = [gradients(r, m, window)[index] * used(r, m, index) for r in range(world) for m in range(3)]
            check(moments, param, chunks)
        moments.reset()


def cancelling(rank: int, world: int) -> None:
    """Chunks that cancel leave their sum: within a rank, and between the ranks."""
    small = torch.arange(1.0, 6.0) * 2**-12
    for within in (True, False):
        params, moments = make(torch.distributed.group.WORLD)
        large = [gradients(rank if within else 0, m)[0].bfloat16().float() for m in range(3)]
        if within:
            rows = [row for grad in large for row in (grad, -grad)]
        else:
            rows = large if rank == 0 else [-large[2], -large[0], -large[1]]
        rows.append(small if rank == 0 else torch.zeros(5))
        for row in rows:
            moments.add(params[0], row)
            moments.end_micro_batch()
        k = moments.finish()
        found = moments.moments(params[0])
        torch.testing.assert_close(found.mean, small / k, rtol=2e-7, atol=0)
        moments.reset()


def unequal_micro_batches(rank: int, world: int) -> None:
    """Every rank raises the error, and none waits."""
    params, moments = make(torch.distributed.group.WORLD)
    for micro_batch in range(2 + rank):
        moments.add(params[0], gradients(rank, micro_batch)[0])
        moments.end_micro_batch()
    with pytest.raises(RuntimeError, match="differ in the micro-batches of this step: 2 on one, 3 on another"):
        moments.finish()


def no_micro_batch_on_one_rank(rank: int, world: int) -> None:
    params, moments = make(torch.distributed.group.WORLD)
    if rank:
        moments.add(params[0], gradients(rank, 0)[0])
        moments.end_micro_batch()
    with pytest.raises(RuntimeError, match="0 on one, 1 on another"):
        moments.finish()


def other_parameters(rank: int, world: int) -> None:
    """Every rank optimizes a part, as under ZeroRedundancyOptimizer."""
    params, _ = make()
    moments = ReplicatedMoments(params[rank:], torch.distributed.group.WORLD)
    moments.add(params[1], gradients(rank, 0)[1])
    moments.end_micro_batch()
    with pytest.raises(RuntimeError, match="differ in the parameters that they optimize: 19 elements on one, 24 on"):
        moments.finish()


ON_RANKS: tuple[Callable[[int, int], None], ...] = (
    merged,
    cancelling,
    unequal_micro_batches,
    no_micro_batch_on_one_rank,
    other_parameters,
)


def on_rank(rank: int, world: int) -> dict[str, str]:
    """Return the tracebacks of the cases that failed."""
    failures: dict[str, str] = {}
    for function in ON_RANKS:
        try:
            function(rank, world)
        except Exception:
            failures[function.__name__] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    answers: list[dict[str, str]] = run_on_ranks(2, on_rank, 2)
    return answers


@pytest.mark.parametrize("name", [function.__name__ for function in ON_RANKS])
def test_two_ranks(failures: list[dict[str, str]], name: str) -> None:
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if name in of_rank]
    assert not failed, "\n".join(failed)
