"""Two levels of exchange, 2 nodes x 2 ranks and 3 x 2, against the same float64 sums and against one level."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ds_vrgd.moments import Moments, NodeGroups, ShardedMoments
from ds_vrgd.moments.buckets import ALIGNMENT
from tests.moments.exchange import CASES, Case, Check, Model, check, failures_of, gradient, make, observe
from tests.moments.test_sharded import SPECIAL, plain_window
from tests.support.ranks import run_on_ranks

PER_NODE = 2


def moments_of_window(case: Case, rank: int, world: int, window: int = 0) -> tuple[Model, ShardedMoments, Moments]:
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, window)
    moments.finish()
    return model, moments, moments.moments(model.shards[0])


def two_runs_are_equal_and_near_one_level(case: Case, rank: int, world: int) -> None:
    """Two runs agree in every bit, and with one exchange among all ranks up to rounding."""
    _, _, first = moments_of_window(case, rank, world)
    _, _, again = moments_of_window(replace(case, shuffled=True, take=True), rank, world)
    _, _, direct = moments_of_window(replace(case, per_node=None), rank, world)
    for name in ("total", "m2"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        torch.testing.assert_close(getattr(first, name), getattr(direct, name), rtol=1e-5, atol=1e-6)
    assert first.parts == direct.parts == case.micro_batches


def ranks_far_apart_lose_nothing(case: Case, rank: int, world: int) -> None:
    """A large mean with a small spread: squares that are not centred would cancel."""
    model, moments = make(case, rank, world)
    chunks = torch.stack(
        [1000 + gradient(case, 0, r, b, 5) / 100 for b in range(case.micro_batches) for r in range(world)]
    )
    for micro_batch in range(case.micro_batches):
        moments.add(model.params[5], chunks[micro_batch * world + rank])
        moments.end_micro_batch()
    moments.finish()
    m2 = ((chunks.double() - chunks.double().mean(0)) ** 2).sum(0)
    found = moments.moments(model.shards[0])
    for element, (owner, at) in enumerate(model.places[5]):
        if owner == rank:
            torch.testing.assert_close(found.m2[at].double(), m2[element], rtol=2e-2, atol=0)


def finish_may_come_again(case: Case, rank: int, world: int) -> None:
    """A second call changes nothing, and after more micro-batches the result is right for all of them."""
    model, moments = make(case, rank, world)
    counts: list[int] = []
    for micro_batches in (1, 1, 2, 3):
        while len(counts) < micro_batches:
            for index, param in enumerate(model.params):
                moments.add(param, gradient(case, 0, rank, len(counts), index))
            moments.end_micro_batch()
            counts.append(moments.finish())
        found = moments.moments(model.shards[0])
        before = found.total.clone(), found.m2.clone()
        check(replace(case, micro_batches=micro_batches), model, moments, rank, world, 0)
        again = moments.moments(model.shards[0])
        assert torch.equal(again.total, before[0])
        assert torch.equal(again.m2, before[1])
    assert counts == [world, 2 * world, 3 * world]


def moments_before_finish_are_refused(case: Case, rank: int, world: int) -> None:
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    with pytest.raises(RuntimeError, match=r"finish\(\) comes before moments\(\)"):
        moments.moments(model.shards[0])
    check(case, model, moments, rank, world, 0)


def a_window_without_a_micro_batch_is_zero(case: Case, rank: int, world: int) -> None:
    model, moments = make(case, rank, world)
    for window in (0, 1):
        assert moments.finish() == 0
        found = moments.moments(model.shards[0])
        assert not found.mean.any()
        assert not found.m2.any()
        observe(case, model, moments, rank, window)
        check(case, model, moments, rank, world, window)
        moments.reset()


def nothing_outlives_the_window(case: Case, rank: int, world: int) -> None:
    """Neither the moments of the shards nor those of the column stay."""
    model, moments = make(case, rank, world)
    observe(case, model, moments, rank, 0)
    moments.finish()
    alive = [weakref.ref(moment) for pair in moments._store._columns.values() for moment in pair]
    alive += [weakref.ref(moment) for pair in moments._store._held.values() for moment in pair]
    assert len(alive) > 2
    moments.reset()
    patience = time.monotonic() + 10
    while any(ref() is not None for ref in alive):  # gloo's threads release them shortly after they are done
        assert time.monotonic() < patience
        time.sleep(0.01)


def bytes_held_and_sent_are_counted(case: Case, rank: int, world: int) -> None:
    """In fp32, gradients go to the other column of the node, two moments of this column to the other nodes."""
    case = replace(case, bucket=10_000)  # one bucket: each rank's region is padded once
    model, moments, _ = moments_of_window(case, rank, world)
    slots = sum(route.slot or 0 for route in model.routes)  # travel whole, also where they are not full
    regions = []
    for owner in range(world):
        own = slots or sum(rank == owner for owned in model.places for rank, _ in owned)
        regions.append(math.ceil(own / ALIGNMENT) * ALIGNMENT)
    column = sum(regions[rank % PER_NODE :: PER_NODE])
    assert moments.sent_bytes() == (4 * (sum(regions) - column), 2 * 4 * (column - regions[rank]))
    held, buffers = moments.held_bytes()
    assert held == 8 * (column + model.shards[0].numel())
    assert buffers >= 4 * sum(regions)
    moments.reset()
    assert moments.held_bytes() == (0, buffers)


def groups_are_consecutive_ranks(case: Case, rank: int, world: int) -> None:
    """Nodes are consecutive ranks; across them are ranks of equal local index, in node order."""
    groups = NodeGroups.build(torch.distributed.group.WORLD, PER_NODE)
    assert groups is not None
    assert (groups.nodes, groups.per_node, groups.rank) == (world // PER_NODE, PER_NODE, rank)
    node, index = divmod(rank, PER_NODE)
    local = torch.distributed.get_process_group_ranks(groups.local)
    across = torch.distributed.get_process_group_ranks(groups.across)
    assert local == list(range(node * PER_NODE, (node + 1) * PER_NODE))
    assert across == list(range(index, world, PER_NODE))


def ranks_in_another_order_are_refused(case: Case, rank: int, world: int) -> None:
    """Torch would sort the ranks, and gradients would reach the wrong owners."""
    group = torch.distributed.new_group(list(range(world))[::-1], sort_ranks=False)
    with pytest.raises(ValueError, match=rf"ascending order.*ranks_per_node={world}"):
        NodeGroups.build(group, PER_NODE)


def unequal_nodes_are_refused(case: Case, rank: int, world: int) -> None:
    group = torch.distributed.group.WORLD
    for wrong in (0, -1, 5, 2 * world):
        with pytest.raises(ValueError, match=rf"ranks_per_node={wrong} .* {world} data-parallel .* one of 1, 2, "):
            NodeGroups.build(group, wrong)
    assert NodeGroups.build(group, 1) is None
    assert NodeGroups.build(group, world) is None


OF_NODES: tuple[Check, ...] = (
    two_runs_are_equal_and_near_one_level,
    ranks_far_apart_lose_nothing,
    finish_may_come_again,
    moments_before_finish_are_refused,
    a_window_without_a_micro_batch_is_zero,
    nothing_outlives_the_window,
    bytes_held_and_sent_are_counted,
)
OF_GROUPS: tuple[Check, ...] = (
    groups_are_consecutive_ranks,
    ranks_in_another_order_are_refused,
    unequal_nodes_are_refused,
)
# For the direct exchange alone, which merges into shards.
DIRECT = {"neighbours_are_merged_at_once"}


def all_cases() -> Iterator[tuple[str, Check, Case]]:
    for name, case in CASES.items():
        yield name, plain_window, replace(case, per_node=PER_NODE)
    for function in (*SPECIAL, *OF_NODES):
        if function.__name__ not in DIRECT:
            for cut in ("runs", "slots"):
                yield f"{cut}-{function.__name__}", function, Case(cut, per_node=PER_NODE)
    for function in OF_GROUPS:
        yield function.__name__, function, Case("runs")


def on_rank(rank: int, world: int) -> dict[str, str]:
    return failures_of(all_cases(), rank, world)


@pytest.fixture(scope="module", params=[4, 6], ids=["2x2", "3x2"])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    """Return the failures of every rank; all cases of a world in one spawn."""
    return run_on_ranks(request.param, on_rank, request.param)


@pytest.mark.parametrize("name", [name for name, _, _ in all_cases()])
def test_two_levels(failures: list[dict[str, str]], name: str) -> None:
    failed = [f"rank {rank}: {of_rank[name]}" for rank, of_rank in enumerate(failures) if name in of_rank]
    assert not failed, "\n".join(failed)
