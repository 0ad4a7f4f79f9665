"""Gradients that reach the moments in many ways, and the plain sums over all ranks in float64 that must come out."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ds_vrgd.moments import NodeGroups, Route, ShardedMoments

# Odd sizes, a scalar, an empty tensor, one that dwarfs the rest, a matrix whose gradient comes transposed.
SHAPES: tuple[tuple[int, ...], ...] = ((7,), (1,), (13, 5), (2, 3), (0,), (101,), (), (4, 4), (29,))
TRANSPOSED = 2


@dataclass(frozen=True)
class Case:
    """A way in which the same gradients reach the moments.

    Attributes:
        cut: "runs" (stages 1 and 2: one flat buffer, equal shards) or "slots" (stage 3: each parameter in equal slots).
        bucket: elements of a bucket.
        shuffled: gradients arrive in another order on every rank, and in every micro-batch.
        dtypes: of the parameters, in turn.
        missing: ``(rank, micro-batch, parameter)`` that takes no part; None stands for all.
        take: nobody else writes to the gradients.
        gap: elements of padding before, between and after the parameters of a shard.
        per_node: ranks per node; None for one level.
    """

    cut: str
    bucket: int = 40
    shuffled: bool = False
    micro_batches: int = 3
    in_flight: int = 2
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    missing: tuple[tuple[int | None, int | None, int | None], ...] = ()
    take: bool = False
    gap: int = 3
    per_node: int | None = None

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
        f"{cut}-taken": Case(cut, take=True, shuffled=True, dtypes=MIXED, missing=((0, None, 3), (1, 1, 5))),
        f"{cut}-without-gaps": Case(cut, gap=0),
    }


@dataclass
class Model:
    """Parameters, this rank's shards of them, and where every element of every parameter is owned."""

    params: list[Tensor]
    routes: list[Route]
    shards: list[Tensor]
    places: list[list[tuple[int, int]]]  # of each parameter's elements: (rank, index in shard)


def flat_cut(params: Sequence[Tensor], rank: int, world: int, gap: int) -> Model:
    """Parameters with gaps between them in one flat buffer, one equal shard per rank."""
    offsets, end = [], gap
    for param in params:
        offsets.append(end)
        end += param.numel() + gap
    size = math.ceil(end / world)
    shard = torch.full((size,), torch.nan)
    places = [[divmod(offset + i, size) for i in range(p.numel())] for p, offset in zip(params, offsets, strict=True)]
    model = Model(list(params), [], [shard], places)
    for index, (param, owned) in enumerate(zip(params, places, strict=True)):
        runs = tuple((r, n) for r in range(world) if (n := sum(owner == r for owner, _ in owned)))
        start = min((at for owner, at in owned if owner == rank), default=-1)
        model.routes.append(Route(param, f"p{index}", param.numel(), runs, shard, start, place=index))
    return model


def slot_cut(params: Sequence[Tensor], rank: int, world: int, gap: int) -> Model:
    """Every parameter in ``world`` equal slots, one per rank, the last of them not full."""
    slots = [math.ceil(param.numel() / world) for param in params]
    starts, end = [], gap
    for slot in slots:
        starts.append(end)
        end += slot + gap
    shard = torch.full((end,), torch.nan)
    places = []
    for param, slot, start in zip(params, slots, starts, strict=True):
        places.append([(i // slot, start + i % slot) for i in range(param.numel())])
    model = Model(list(params), [], [shard], places)
    for index, (param, owned, slot, start) in enumerate(zip(params, places, slots, starts, strict=True)):
        runs = tuple((r, n) for r in range(world) if (n := sum(owner == r for owner, _ in owned)))
        model.routes.append(Route(param, f"p{index}", param.numel(), runs, shard, start, slot, place=index))
    return model


def make(case: Case, rank: int, world: int) -> tuple[Model, ShardedMoments]:
    params = [torch.zeros(s, dtype=case.dtypes[i % len(case.dtypes)]) for i, s in enumerate(SHAPES)]
    model = {"runs": flat_cut, "slots": slot_cut}[case.cut](params, rank, world, case.gap)
    group, nodes = torch.distributed.group.WORLD, node_groups(case.per_node)
    return model, ShardedMoments(model.routes, group, case.bucket, nodes=nodes, in_flight=case.in_flight)


@cache
def node_groups(per_node: int | None) -> NodeGroups | None:
    return per_node and NodeGroups.build(torch.distributed.group.WORLD, per_node)


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
                moments.add(model.params[index], grad, keep=case.take)
                if not case.take:
                    grad.fill_(torch.nan)  # autograd owns it again: it must have been copied
        moments.end_micro_batch()


def expected(case: Case, model: Model, rank: int, world: int, window: int) -> tuple[Tensor, Tensor]:
    """Return mean and centred sum of squares on this rank's shard, element by element; 0 in padding."""
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
    assert padding.any() or not case.gap or case.cut == "runs"  # a rank may own the middle of a large parameter
    assert (found_mean[padding] == 0).all()
    assert (found_m2[padding] == 0).all()


Check = Callable[[Case, int, int], None]


def failures_of(checks: Iterable[tuple[str, Check, Case]], rank: int, world: int) -> dict[str, str]:
    """Return the tracebacks of the cases that failed; memory that is not initialised is NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    failures: dict[str, str] = {}
    for name, function, case in checks:
        try:
            function(case, rank, world)
        except Exception:
            failures[name] = traceback.format_exc()
    return failures
