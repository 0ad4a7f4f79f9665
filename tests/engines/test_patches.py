"""The order in which patches of one method run, and what is left after they are undone."""

from __future__ import annotations

import pytest

from ds_vrgd.engines.patches import Patches


class Engine:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, fails: bool = False) -> str:
        self.calls.append("step")
        if fails:
            raise ValueError("fails")
        return "result"


def test_later_patches_are_outside_and_an_error_skips_what_follows() -> None:
    engine, patches = Engine(), Patches()
    patches.follow(engine, "step", before=lambda: engine.calls.append("b1"), after=lambda: engine.calls.append("a1"))
    patches.follow(engine, "step", before=lambda: engine.calls.append("b2"), after=lambda: engine.calls.append("a2"))
    assert engine.step() == "result"
    assert engine.calls == ["b2", "b1", "step", "a1", "a2"]
    engine.calls.clear()
    with pytest.raises(ValueError, match="fails"):
        engine.step(fails=True)
    assert engine.calls == ["b2", "b1", "step"]


def test_undo_gives_the_object_its_own_methods_back() -> None:
    engine, patches = Engine(), Patches()
    own = engine.__dict__["other"] = lambda: "other"
    for name in ("step", "other", "step"):
        patches.follow(engine, name)
    assert {"step", "other"} <= vars(engine).keys()
    patches.undo()
    assert vars(engine) == {"calls": [], "other": own}
