"""Optimizer offload: what lives where, and what DeepSpeed's offload to NVMe lacks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.support.model import batches
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import Case, build

WAYS = tuple(product((1, 2, 3), (False, True)))


def places(rank: int) -> dict[tuple[int, bool], dict[str, Any]]:
    """Devices of an engine's tensors, in the middle of ``step()``, by stage and ``pin_memory``."""
    found = {}
    for stage, pin_memory in WAYS:
        offload = {"device": "cpu", "pin_memory": pin_memory}
        case = replace(Case("VRLAMB", stage, "bf16", 2), zero={"offload_optimizer": offload})
        engine = build(case, 1)
        optimizer = engine.basic_optimizer
        observer = optimizer.observer
        seen: dict[str, Any] = {"mode": observer.mode, "copies": [], "pinned": [], "held": []}

        def note(tensor: Any, moments_of: Any = observer.moments, seen: Any = seen, observer: Any = observer) -> Any:
            moments = moments_of(tensor)
            held = observer._cut._store.of(tensor)
            seen["held"] += [moment.device.type for moment in held]
            seen["copies"] += [moments.total.device.type, moments.m2.device.type]
            seen["pinned"] += [moments.total.is_pinned(), moments.m2.is_pinned()]
            seen["shared"] = moments.total.data_ptr() == held[0].data_ptr()
            return moments

        observer.moments = note
        for tokens in batches(0, 2):
            engine.backward(engine(tokens.to(engine.device)))
            engine.step()
        entries = [entry for state in optimizer.state.values() for entry in state.values()]
        seen["state"] = [entry.device.type for entry in entries]
        seen["weights"] = [tensor.device.type for tensor in observer.tensors]
        seen["after"] = observer.held_bytes()[0]
        found[stage, pin_memory] = seen
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, bool], dict[str, Any]]:
    answer: dict[tuple[int, bool], dict[str, Any]] = run_on_ranks(1, places)[0]
    return answer


@pytest.mark.parametrize(("stage", "pin_memory"), WAYS)
def test_what_lives_where(found: dict[tuple[int, bool], dict[str, Any]], stage: int, pin_memory: bool) -> None:
    seen = found[stage, pin_memory]
    assert seen["mode"] == "observe"
    assert set(seen["state"]) == set(seen["weights"]) == {"cpu"}
    assert set(seen["held"]) == {DEVICE}, "moments are formed where the gradients are"
    assert set(seen["copies"]) == {"cpu"}
    assert seen["shared"] is (DEVICE == "cpu"), "a copy on the same device"
    assert seen["after"] == 0, "the window's moments outlive it"
    if DEVICE != "cpu":
        assert set(seen["pinned"]) == {pin_memory}
