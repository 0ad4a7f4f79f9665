"""The elements that a rank owns, from the runs into which its parameters are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_vrgd.engines.deepspeed.wrappers import Holdings, _add, runs_across, slots
from ds_vrgd.moments import Layer, Route, Segment


def test_runs_across_shards_and_slots() -> None:
    assert runs_across(3, 6, 4) == ((0, 1), (1, 4), (2, 1))
    assert runs_across(4, 0, 4) == ()
    assert slots(5, 2, 4) == ((0, 2), (1, 2), (2, 1))


@pytest.mark.parametrize("is_observed", [False, True])
def test_experts_have_routes_of_their_own_where_they_are_observed(
    is_observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    held, shard = Holdings(group="everyone"), torch.zeros(4)
    layers: Any = SimpleNamespace(of=lambda param, partition: Layer("expert", param.numel()))
    part = Route(torch.zeros(6), "", 6, runs_across(3, 6, 4), shard, 0)
    _add(held, layers, shard, [part], "experts", is_observed=is_observed)
    assert held.layouts[shard].segments == (Segment(0, 0, 4, 1),)
    assert held.routes == []
    assert [route.name for route in held.experts.get("experts", [])] == ["expert"] * is_observed
    assert bool(held.experts) == is_observed
