"""The watch on made gradients: what it names, what it leaves alone, and how it counts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd import LAMB, VRLAMB, RankEvent, RankReport, RankWatch, rank_report
from ds_vrgd.moments import Comparison, Ranks
from ds_vrgd.optim.ranks.recorder import RankRecorder
from ds_vrgd.optim.ranks.series import FALSE_ALARMS, HORIZON, WARMUP, Series
from ds_vrgd.optim.ranks.watch import QUIET

SHAPES = {"embedding": (400,), "weight": (30, 20), "bias": (20,)}
Gradients = list[dict[str, Tensor]]
RANKS = 8


def made(steps: int, ranks: int = RANKS, seed: int = 0, signal: float = 0.3) -> Iterable[Gradients]:
    """Yield the gradients of steps: a common part, and noise that has another size in each batch."""
    generator = torch.Generator().manual_seed(seed)
    common = {name: signal * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for _ in range(steps):
        sizes = torch.randn(ranks, generator=generator).mul(0.1).exp().tolist()
        yield [
            {name: common[name] + size * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
            for size in sizes
        ]


def followed(
    steps: int, fault: Callable[[Gradients, int], None] | None = None, before: int = 40, **given: Any
) -> tuple[RankWatch, list[RankEvent]]:
    """Return the watch and its events over ``before`` clean steps and ``steps`` with a fault."""
    watch = RankWatch()
    for step, gradients in enumerate(made(before + steps, **given)):
        if fault is not None and step >= before:
            fault(gradients, step - before)
        watch.update(RankReport.of_gradients(gradients, step))
    return watch, watch.events


def scaled(factor: float, *layers: str, rank: int = 5) -> Callable[[Gradients, int], None]:
    def apply(gradients: Gradients, step: int) -> None:
        for layer in layers or SHAPES:
            gradients[rank][layer] = gradients[rank][layer] * factor

    return apply


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_clean_steps_raise_no_alarm(ranks: int) -> None:
    watch, events = followed(1500, ranks=ranks, seed=3)
    assert events == []
    assert watch.steps == 1540


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize(
    ("factor", "layers", "fault"),
    [(0.5, (), "scaled"), (2.0, ("weight",), "scaled"), (0.0, ("weight",), "zero"), (-1.0, ("weight",), "flipped"),
     (0.0, (), "zero")],
)  # fmt: skip
def test_a_factor_is_named_with_rank_and_layer(factor: float, layers: tuple[str, ...], fault: str, ranks: int) -> None:
    _, events = followed(40, scaled(factor, *layers, rank=2), ranks=ranks)
    assert [(event.rank, event.fault, event.layers[:1]) for event in events] == [(2, fault, layers)]
    assert 0.99 <= events[0].confidence <= 1.0
    assert 40 <= events[0].step < 70


def test_the_norm_of_a_scaled_gradient_is_told() -> None:
    _, (event,) = followed(40, scaled(0.5))
    assert "rank 5: scaled: its norm is 0." in str(event)


def test_nan_and_infinity_are_told_at_once_with_their_layers() -> None:
    def spoil(gradients: Gradients, step: int) -> None:
        gradients[1]["bias"][3] = math.nan
        gradients[6]["weight"][0, 0] = -math.inf

    _, events = followed(1, spoil, before=0)
    assert [(event.rank, event.fault, event.layers) for event in events] == [
        (1, "nonfinite", ("bias",)), (6, "nonfinite", ("weight",)),
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_identical_gradients_are_told_at_once_on_any_number_of_ranks(ranks: int) -> None:
    def repeat(gradients: Gradients, step: int) -> None:
        gradients[1] = gradients[0]

    _, events = followed(1, repeat, before=0, ranks=ranks)
    assert [(event.rank, event.fault, event.peers) for event in events] == [(0, "identical", (1,))]


def test_ranks_that_all_have_the_same_data_are_one_event() -> None:
    def repeat(gradients: Gradients, step: int) -> None:
        gradients[:] = [gradients[0]] * len(gradients)

    _, (event,) = followed(1, repeat, before=0)
    assert event.fault == "identical"
    assert (event.rank, *event.peers) == tuple(range(RANKS))


def test_ranks_that_share_a_part_of_their_data_are_told() -> None:
    def share(gradients: Gradients, step: int) -> None:
        for name in SHAPES:
            gradients[3][name] = 0.5 * (gradients[3][name] + gradients[6][name])

    _, events = followed(30, share)
    assert [(event.rank, event.fault, event.peers) for event in events if event.fault == "identical"] == [
        (3, "identical", (6,))
    ]


def test_a_rank_that_repeats_its_batch() -> None:
    kept: Gradients = []

    def repeat(gradients: Gradients, step: int) -> None:
        kept.append(gradients[4])
        gradients[4] = kept[0]

    _, events = followed(30, repeat)
    assert [(event.rank, event.fault) for event in events] == [(4, "repeated")]


def test_an_offset_that_stays_is_a_drift() -> None:
    offset = {
        name: 0.6 * torch.randn(shape, generator=torch.Generator().manual_seed(9)) for name, shape in SHAPES.items()
    }

    def drift(gradients: Gradients, step: int) -> None:
        gradients[4] = {name: 0.8 * gradients[4][name] + offset[name] for name in SHAPES}

    _, events = followed(60, drift)
    assert events[0].rank == 4
    assert events[0].fault in ("drifted", "wrong", "repeated")


def test_a_single_element_is_named_with_its_place() -> None:
    def flip(gradients: Gradients, step: int) -> None:
        if step == 0:
            gradients[3]["weight"][7, 11] = 1e6

    _, events = followed(3, flip)
    assert [(event.rank, event.fault, event.layers, event.step) for event in events] == [
        (3, "element", ("weight",), 40)
    ]
    assert f"element {7 * 20 + 11} " in events[0].detail


def test_quiet_ranks_beside_a_loud_one_are_neither_identical_nor_zero() -> None:
    def loud(gradients: Gradients, step: int) -> None:
        for rank, factor in ((0, 100.0), (2, 1e-4), (5, 1e-4)):
            gradients[rank] = {name: factor * gradient for name, gradient in gradients[rank].items()}

    _, events = followed(1, loud)
    assert {event.fault for event in events} & {"identical", "zero"} == set()


def test_a_small_element_where_the_others_have_none_is_no_fault() -> None:
    def dead(gradients: Gradients, step: int) -> None:
        for rank, of_rank in enumerate(gradients):
            of_rank["weight"][:, 3] = 1e-5 if rank == 4 else 0.0

    _, events = followed(1, dead)
    assert events == []


def test_a_fault_is_told_once_in_a_while_and_the_others_are_left_alone() -> None:
    _, events = followed(2 * QUIET + 40, scaled(0.4, "weight"))
    assert "weight" in events[0].layers
    assert {event.rank for event in events} == {5}
    assert 2 <= len(events) <= 3
    assert all(later.step - first.step >= QUIET for first, later in itertools.pairwise(events))


def test_three_ranks_are_not_compared() -> None:
    _, events = followed(60, scaled(0.1, rank=2), ranks=3)
    assert events == []


def test_a_layer_without_gradients_is_left_alone() -> None:
    def empty(gradients: Gradients, step: int) -> None:
        for rank, of_rank in enumerate(gradients):
            of_rank["bias"] = of_rank["bias"] * float(rank == step % RANKS)  # one rank has some, in turn
            of_rank["embedding"] = torch.zeros(400)

    _, events = followed(150, empty, before=0)
    assert events == []


def test_other_layers_begin_anew() -> None:
    watch = RankWatch()
    for step, gradients in enumerate(made(WARMUP + 5)):
        watch.update(RankReport.of_gradients(gradients, step))
    for step, gradients in enumerate(made(5, ranks=6)):
        watch.update(RankReport.of_gradients(gradients, step))
    assert watch.events == []
    assert watch.steps == WARMUP + 10


@pytest.mark.parametrize("members", [4, 8, 28])
def test_sums_pass_their_bound_as_rarely_as_is_claimed(members: int) -> None:
    """The mean of exp(sum) cannot grow where every order is equally likely, whatever the values are."""
    generator = torch.Generator().manual_seed(members)
    rows = 2000
    series = Series(torch.ones(rows, 2), torch.full((rows,), rows), torch.full((rows,), 30.0), members)
    growth = torch.zeros(rows, members, dtype=torch.double)
    active, steps = torch.ones(members, dtype=torch.bool), 30
    for _ in range(steps):
        series.sums.zero_()
        series.add(torch.randn(rows, members, generator=generator).double().pow(3), active)  # heavy tails
        growth += series.sums[0]
    # A step of the sum that is not restarted is a likelihood ratio, whose mean is 1.
    assert float(series.bounds[0]) == pytest.approx(math.log(rows * members * HORIZON / FALSE_ALARMS))
    place = torch.special.ndtri((torch.arange(members).double() + 0.5) / members)
    ratio = (1.5 * place).exp() / (1.5 * place).exp().mean()
    assert float(ratio.mean()) == pytest.approx(1.0)
    assert float(growth.mean() / steps) == pytest.approx(float(ratio.log().clamp(min=0.0).mean()), rel=0.05)


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([], "has no rank"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], r"rank 1 has .* and rank 0 has .* same layers"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(3)}], r"rank 1 has \(3,\) for layer 'a', and rank 0 has \(2,\)"),
    ],
)
def test_gradients_that_do_not_fit_are_named(gradients: list[dict[str, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankReport.of_gradients(gradients)


def test_a_report_has_the_ranks_side_by_side() -> None:
    gradients = [{"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, -4.0])}, {"w": torch.tensor([-3.0, 4.0])}]
    report = RankReport.of_gradients(gradients, 7)
    assert report.step == 7
    assert report.layers == ("w",)
    assert report.ranks == (0, 1, 2)
    assert report.norms.tolist() == [pytest.approx([5.0, 5.0, 5.0])]
    assert report.gaps[0].flatten().tolist() == pytest.approx([0, 8, 6, 8, 0, 10, 6, 10, 0])
    mean = torch.tensor([1.0, 4.0 / 3.0])
    right = [float((of["w"] - mean).norm()) for of in gradients]
    assert report.distances[0].tolist() == pytest.approx(right)
    assert report.cosines[0, 0].item() == pytest.approx(0.0, abs=1e-6)  # the mean of the others is 0
    assert report.cosines[0, 1].item() == pytest.approx((0.0 * 3 - 4.0 * 4) / 20.0)


def test_a_window_whose_step_raised_an_error_is_in_no_report() -> None:
    # with nonfinite="error" the step ends before it is judged
    windows = list(made(2))
    comparison = Comparison(list(SHAPES), range(RANKS), None, RANKS)
    recorder = RankRecorder("VRLAMB", "log")
    for window, gradients in enumerate(windows):
        for row, name in enumerate(SHAPES):
            rows = torch.stack([of_rank[name].flatten() for of_rank in gradients])
            comparison.add(rows, name, lambda row=row, rows=rows: [(0, rows.shape[1], row, 0)])  # type: ignore[misc]
        observer: Any = SimpleNamespace(
            comparison=comparison, window=window, finish=lambda: RANKS, unit=lambda k: 1.0, ranks=Ranks()
        )
        recorder.take(observer)
        comparison.clear()
    recorder.judge()
    assert recorder.report is not None
    assert recorder.report.nodes is None
    assert recorder.report.step == 1
    torch.testing.assert_close(recorder.report.norms, RankReport.of_gradients(windows[1]).norms)


@pytest.mark.parametrize("optimizer", [VRLAMB, LAMB])
def test_without_an_engine_there_is_nothing_to_compare(optimizer: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    stepper = optimizer([weight], watch="log")
    for _ in range(2):
        (weight**2).sum().backward()
    with pytest.raises(ValueError, match=r"watch='log' compares .* without an engine .*FSDP2 with ds_vrgd\.attach"):
        stepper.step()
    assert torch.equal(weight.detach(), torch.ones(3))


def test_a_report_needs_a_watch() -> None:
    with pytest.raises(RuntimeError, match="watch=None compares no ranks"):
        rank_report(LAMB([torch.nn.Parameter(torch.ones(3))]))
    with pytest.raises(RuntimeError, match="it has not stepped yet"):
        rank_report(LAMB([torch.nn.Parameter(torch.ones(3))], watch="log"))
