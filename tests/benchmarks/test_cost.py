"""The cost model against sums that are done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost, model
from benchmarks.cost import Link, Machine

P = 1000


def test_one_node_sends_what_everybody_knows() -> None:
    assert cost.all_reduce(800, 4, 8).inside_bytes == 2 * 3 / 4 * 800
    assert cost.reduce_scatter(800, 4, 8).inside_bytes == 3 / 4 * 800
    assert cost.all_to_all(800, 4, 8).inside_bytes == 3 / 4 * 800
    for call in (cost.all_reduce, cost.reduce_scatter, cost.all_to_all):
        assert (call(800, 4, 8).between_bytes, call(800, 4, 8).between_messages) == (0, 0)


def test_two_nodes_of_two() -> None:
    # Inside: scatter and gather 1/2 of 800 each. Between: 400 bytes all-reduced by two.
    ring = cost.all_reduce(800, 4, 2)
    assert (ring.inside_bytes, ring.between_bytes, ring.inside_messages, ring.between_messages) == (800, 400, 2, 2)
    # 200 bytes for each of the others, one of whom is near.
    direct = cost.all_to_all(800, 4, 2)
    assert (direct.inside_bytes, direct.between_bytes) == (200, 400)
    assert (direct.inside_messages, direct.between_messages) == (1, 2)


def test_nodes_must_be_full() -> None:
    with pytest.raises(ValueError, match="12 ranks do not fill nodes of 8"):
        cost.all_reduce(1, 12, 8)


def test_zero_1_reduces_once_a_step() -> None:
    calls = [cost.deepspeed(stage, P, 4, 8, 3).calls[0].inside_bytes for stage in (1, 2, 3)]
    once = 2 * 3 / 4 * cost.WIRE * P
    assert calls == [once, 3 * once, 3 * once / 2]


def test_two_levels_send_moments_once_a_step() -> None:
    # Columns of P/2 elements; half of their 8 bytes each go to the other node.
    for accumulation in (1, 4):
        of = cost.two_levels(P, 4, 2, accumulation)
        assert sum(call.between_bytes for call in of.calls) == 1 / 2 * 8 * P / 2
        assert sum(call.inside_bytes for call in of.calls) == accumulation * 1 / 2 * 2 * P
    assert cost.two_levels(P, 4, 8, 2) == cost.one_level(P, 4, 8, 2)


def test_held_memory_is_moments_and_buffers() -> None:
    buffers = 5 * 2 * P
    assert cost.one_level(P, 4, 2, 1).held_bytes == 8 * P / 4 + buffers
    assert cost.two_levels(P, 4, 2, 1).held_bytes == 8 * P / 4 + 8 * P / 2 + buffers


def test_memory_traffic_of_moments() -> None:
    # Two ranks, two micro-batches: 2P bytes read each time; moments written, then read and written.
    assert cost.one_level(P, 2, 8, 2).memory_bytes == 2 * 2 * P + (8 + 16) * P / 2


def test_a_larger_model_has_more_messages_but_no_more_bytes_for_them() -> None:
    parameters = 3 * cost.BUCKET
    call = cost.one_level(parameters, 2, 8, 1).calls[0]
    assert (call.inside_messages, call.inside_bytes) == (3, parameters)


def test_seconds_add_up() -> None:
    machine = Machine(2, {"all-reduce": Link(1.0, 10.0)}, Link(100.0, 1000.0), 1.0)
    # 2 messages and 80 bytes inside, 2 messages and 40 bytes between.
    assert cost.all_reduce(80, 4, 2).seconds(machine) == pytest.approx(2 + 8 + 200 + 0.04)


def test_fit_finds_the_link_that_it_was_measured_on() -> None:
    link = Link(5e-6, 3e11)
    points = [(2, size, link.seconds(2, size)) for size in (1e6, 3e7, 7e8)]
    found = cost.fit(points)
    assert found.alpha == pytest.approx(link.alpha)
    assert found.beta == pytest.approx(link.beta)


def test_one_size_leaves_alpha_at_0() -> None:
    assert cost.fit([(2, 1e6, 1e-3)]) == Link(0.0, pytest.approx(1e9))
    with pytest.raises(ValueError, match="no measured"):
        cost.fit([])


def _run() -> dict[str, Any]:
    rows = [
        {"name": name, "elements": elements, "ranks": 2, "seconds": {"median": 1e-5 + elements * 2 / 1e11}}
        for name in cost.COLLECTIVES
        for elements in (10**4, 10**6, 10**8)
    ]
    for name in ("all-to-all and moments", "exchange and moments"):
        rows.append({"name": name, "elements": 10**8, "ranks": 2, "seconds": {"median": 4e-3}})
    return {"environment": {"date": "today", "ranks": 2, "card": "a card"}, "collectives": rows}


def test_a_run_gives_the_links() -> None:
    source = model.measured(_run())
    # An all-reduce of two ranks has two messages, and sends its whole buffer once.
    assert source.machine.inside["all-reduce"].alpha == pytest.approx(5e-6)
    assert source.machine.inside["all-reduce"].beta == pytest.approx(1e11)
    assert source.machine.inside["all-to-all"].beta == pytest.approx(5e10)
    # 6e8 bytes read and written by the moments, in what the all-to-all alone does not take.
    assert source.machine.memory == pytest.approx(6e8 / (4e-3 - 1e-5 - 2e-3))


def test_the_page_is_what_the_model_says(tmp_path: Path) -> None:
    """The page without a measurement; with one, it names the run."""
    page = tmp_path / "SCALING.md"
    text = (model.DOCS / "SCALING.md").read_text()
    page.write_text(text)
    assert model.main(["--page", str(page)]) == 0
    known = page.read_text()
    assert known == text or "fitted to the collectives" in text
    assert "| fused, two levels |" in known
