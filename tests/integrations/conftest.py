"""Trainings, once per session: one spawn for the fast cases, one for the slow ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.cases import train_all
from tests.support.ranks import run_on_ranks


@pytest.fixture(scope="session")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, bool], Any]:
    """Return the outcome of a case, by its kind, its name and whether it is slow."""
    found: dict[bool, dict[tuple[str, str], Any]] = {}

    def look_up(kind: str, name: str, slow: bool = False) -> Any:
        if slow not in found:
            found[slow] = run_on_ranks(2, train_all, str(tmp_path_factory.mktemp("trainer")), slow)[0]
        return found[slow][kind, name]

    return look_up
