"""The protocol of exchanges: every one has all of its methods, with the same parameters."""

from __future__ import annotations

import inspect

import pytest

from ds_vrgd.moments import (
    CombinedMoments,
    CopiedMoments,
    Exchange,
    ReplicatedMoments,
    ShardedMoments,
)
from ds_vrgd.moments.exchange import added

METHODS = [name for name in vars(Exchange) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cls", [CombinedMoments, CopiedMoments, ReplicatedMoments, ShardedMoments])
def test_every_exchange_follows_the_protocol(cls: type, name: str) -> None:
    ours, protocol = getattr(cls, name), getattr(Exchange, name)
    assert inspect.signature(ours) == inspect.signature(protocol)


def test_the_protocol_has_the_methods_that_adapters_call() -> None:
    assert {"add", "drop", "hold_back", "end_micro_batch", "finish", "moments", "reset", "detach"} <= set(METHODS)


def test_bytes_are_added_by_kind() -> None:
    assert added([(1, 10), (2, 20)]) == (3, 30)
