"""The exchange on two and three ranks, against plain sums over the stacked gradients of all ranks in float64."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments import Route, ShardedMoments
from tests.support.ranks import run_on_ranks

# Odd sizes, a scalar, an empty tensor, one that dwarfs the rest, a matrix whose gradient comes transposed.
SHAPES: tuple[tuple[int, ...], ...] = ((7,), (1,), (13, 5), (2, 3), (0,), (101,), (), (4, 4), (29,))
TRANSPOSED = 2
GAP = 3  # elements of padding before, between and behind the parameters of a shard


@dataclass(frozen=True)
class Case:
    """How the same gradients reach the moments.

    Attributes:
        cut: "runs" (stages 1 and 2: one flat buffer, equal shards) or "slots" (stage 3: each parameter in equal slots).
        bucket: elements of a bucket.
        shuffled: gradients arrive in another order on every rank, and in every micro-batch.
        dtypes: of the parameters, in turn.
        missing: ``(rank, micro-batch, parameter)`` that takes no part; None stands for all.
    """

    cut: str
    bucket: int = 40
    shuffled: bool = False
    micro_batches: int = 3
    in_flight: int = 2
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    missing: tuple[tuple[int | None, int | None, int | None], ...] = ()

    def takes_part(self, rank: int, micro_batch: int, index: int) -> bool:
        here = (rank, micro_batch, index)
        return not any(all(a is None or a == b for a, b in zip(gap, here, strict=True)) for gap in self.missing)


MIXED = (torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, Case] = {}
for cut in ("runs", "slots"):
    CASES |= {
        f"{cut}": Case(cut),
        f"{cut}-a-bucket-each": Case(cut, bucket=1),
        f"{cut}-one-bucket": Case(cut, bucket=10_000),
        f"{cut}-shuffled": Case(cut, shuffled=True),
        f"{cut}-shuffled-one-in-flight": Case(cut, bucket=1, shuffled=True, in_flight=1),
        f"{cut}-one-micro-batch": Case(cut, micro_batches=1),
        f"{cut}-bf16": Case(cut, dtypes=(torch.bfloat16,)),
        f"{cut}-mixed-dtypes": Case(cut, dtypes=MIXED, shuffled=True),
        f"{cut}-missing-on-one-rank": Case(cut, missing=((0, None, 3), (1, 1, 5), (1, 0, 0)), shuffled=True),
        f"{cut}-missing-everywhere": Case(cut, missing=((None, None, 5), (None, 1, 0))),
        f"{cut}-a-rank-begins-late": Case(cut, missing=((1, 0, None),)),
    }


@dataclass
class Model:
    """Parameters, this rank's shards of them, and where every element of every parameter is owned."""

    params: list[Tensor]
    routes: list[Route]
    shards: list[Tensor]
    places: list[list[tuple[int, int]]]  # of each parameter's elements: (rank, index in shard)


def flat_cut(params: Sequence[Tensor], rank: int, world: int) -> Model:
    """Parameters with gaps between them in one flat buffer, one equal shard a rank."""
    offsets, end = [], GAP
    for param in params:
        offsets.append(end)
        end += param.numel() + GAP
    size = math.ceil(end / world)
    shard = torch.full((size,), torch.nan)
    places = [[divmod(offset + i, size) for i in range(p.numel())] for p, offset in zip(params, offsets, strict=True)]
    model = Model(list(params), [], [shard], places)
    for index, (param, owned) in enumerate(zip(params, places, strict=True)):
        runs = tuple((r, n) for r in range(world) if (n := sum(owner == r for owner, _ in owned)))
        start = min((at for owner, at in owned if owner == rank), default=-1)
        model.routes.append(Route(param, f"p{index}", param.numel(), runs, shard, start))
    return model


def slot_cut(params: Sequence[Tensor], rank: int, world: int) -> Model:
    """Every parameter in ``world`` equal slots, one a rank, the last of them not full."""
    slots = [math.ceil(param.numel() / world) for param in params]
    starts, end = [], GAP
    for slot in slots:
        starts.append(end)
        end += slot + GAP
    shard = torch.full((end,), torch.nan)
    places = []
    for param, slot, start in zip(params, slots, starts, strict=True):
        places.append([(i // slot, start + i % slot) for i in range(param.numel())])
    model = Model(list(params), [], [shard], places)
    for index, (param, owned, slot, start) in enumerate(zip(params, places, slots, starts, strict=True)):
        runs = tuple((r, n) for r in range(world) if (n := sum(owner == r for owner, _ in owned)))
        model.routes.append(Route(param, f"p{index}", param.numel(), runs, shard, start, slot=slot))
    return model


def make(case: Case, rank: int, world: int) -> tuple[Model, ShardedMoments]:
    params = [torch.zeros(s, dtype=case.dtypes[i % len(case.dtypes)]) for i, s in enumerate(SHAPES)]
    model = {"runs": flat_cut, "slots": slot_cut}[case.cut](params, rank, world)
    group = torch.distributed.group.WORLD
    return model, ShardedMoments(model.routes, group, case.bucket, case.in_flight)


def gradient(case: Case, window: int, rank: int, micro_batch: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * window + 1000 * micro_batch + 100 * rank + index)
    shape, dtype = SHAPES[index], case.dtypes[index % len(case.dtypes)]
    mean = torch.randn(shape, generator=torch.Generator().manual_seed(index))
    values = (mean + torch.randn(shape, generator=generator)).to(dtype)
    return values.t().contiguous().t() if index == TRANSPOSED else values


def observe(case: Case, model: Model, moments: ShardedMoments, rank: int, window: int) -> None:
    """Bring this rank's gradients of a window."""
    for micro_batch in range(case.micro_batches):
        order = list(range(len(SHAPES)))
        if case.shuffled:
            seed = torch.Generator().manual_seed(100 * micro_batch + rank)
            order = torch.randperm(len(SHAPES), generator=seed).tolist()
        for index in order:
            if case.takes_part(rank, micro_batch, index):
                grad = gradient(case, window, rank, micro_batch, index)
                moments.add(model.params[index], grad)
                grad.fill_(torch.nan)  # autograd owns it again: it must have been copied
        moments.end_micro_batch()


def expected(case: Case, model: Model, rank: int, world: int, window: int) -> tuple[Tensor, Tensor]:
    """Mean and centred sum of squares on this rank's shard, element by element; 0 in padding."""
    mean, m2 = (torch.zeros(model.shards[0].numel(), dtype=torch.float64) for _ in range(2))
    for index, owned in enumerate(model.places):
        chunks = torch.stack(
            [
                gradient(case, window, r, b, index).double().flatten() * case.takes_part(r, b, index)
                for b in range(case.micro_batches)
                for r in range(world)
            ]
        )
        centre = chunks.mean(0)
        squares = ((chunks - centre) ** 2).sum(0)
        for element, (owner, at) in enumerate(owned):
            if owner == rank:
                mean[at], m2[at] = centre[element], squares[element]
    return mean, m2


def check(case: Case, model: Model, moments: ShardedMoments, rank: int, world: int, window: int) -> None:
    assert moments.finish() == case.micro_batches * world
    found = moments.moments(model.shards[0])
    found_mean, found_m2 = found.mean, found.m2
    mean, m2 = expected(case, model, rank, world, window)
    assert found_mean.dtype == found_m2.dtype == torch.float32
    torch.testing.assert_close(found_mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found_m2.double(), m2, rtol=1e-5, atol=1e-6)
    padding = torch.ones(model.shards[0].numel(), dtype=torch.bool)
    for owned in model.places:
        padding[[at for owner, at in owned if owner == rank]] = False
    assert padding.any()
    assert (found_mean[padding] == 0).all()
    assert (found_m2[padding] == 0).all()


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
    variants = Case(case.cut), Case(case.cut, bucket=1, shuffled=True), Case(case.cut, bucket=10_000, in_flight=1)
    for variant in variants:
        model, moments = make(variant, rank, world)
        observe(variant, model, moments, rank, 0)
        of_variant = moments.moments(model.shards[0])
        found.append((of_variant.mean, of_variant.m2))
    for mean, m2 in found[1:]:
        assert torch.equal(mean, found[0][0])
        assert torch.equal(m2, found[0][1])


def twice_in_a_micro_batch_is_one_chunk(case: Case, rank: int, world: int) -> None:
    """Two gradients of one parameter before its bucket has left are summed: halves make the whole."""
    case = Case(case.cut, bucket=10_000)
    model, moments = make(case, rank, world)
    for micro_batch in range(case.micro_batches):
        for index in (0, *range(len(SHAPES))):
            grad = gradient(case, 0, rank, micro_batch, index)
            moments.add(model.params[index], grad / 2 if index == 0 else grad)
        moments.end_micro_batch()
    check(case, model, moments, rank, world, 0)


def twice_after_the_exchange_is_refused(case: Case, rank: int, world: int) -> None:
    """A second gradient that comes when the first has left cannot be summed any more."""
    case = Case(case.cut, bucket=1)
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
    of_shard = moments.moments(torch.full((5,), torch.nan))
    mean, m2 = of_shard.mean, of_shard.m2
    assert mean.tolist() == m2.tolist() == [0.0] * 5


def moments_are_fresh(case: Case, rank: int, world: int) -> None:
    """What the caller does to them changes nothing."""
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    of_shard = moments.moments(model.shards[0])
    for tensor in (of_shard.total, of_shard.m2):
        tensor.fill_(torch.nan)
    check(case, model, moments, rank, world, 0)


SPECIAL: tuple[Callable[[Case, int, int], None], ...] = (
    routing_changes_no_bit,
    twice_in_a_micro_batch_is_one_chunk,
    twice_after_the_exchange_is_refused,
    a_broken_off_window_leaves_nothing,
    a_shard_that_was_not_routed_is_zero,
    moments_are_fresh,
)


def all_cases() -> Iterator[tuple[str, Callable[[Case, int, int], None], Case]]:
    for name, case in CASES.items():
        yield name, plain_window, case
    for function in SPECIAL:
        for cut in ("runs", "slots"):
            yield f"{cut}-{function.__name__}", function, Case(cut)


def on_rank(rank: int, world: int) -> dict[str, str]:
    """Tracebacks of the cases that failed."""
    failures: dict[str, str] = {}
    for name, function, case in all_cases():
        try:
            function(case, rank, world)
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


@pytest.fixture(scope="module", params=[2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Of every rank; all cases of a world in one spawn."""
    answers: list[dict[str, Any]] = run_on_ranks(request.param, on_rank, request.param)
    return answers


@pytest.mark.parametrize("name", [name for name, _, _ in all_cases()])
def test_exchange(failures: list[dict[str, str]], name: str) -> None:
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if name in of_rank]
    assert not failed, "\n".join(failed)
