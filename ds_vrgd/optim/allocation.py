"""Steps that only make state: some wrappers of DeepSpeed call ``step()`` with zero gradients while they are built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: Whether ``step()`` creates missing state and updates nothing.
state_only = False


@contextmanager
def allocate_state_only() -> Iterator[None]:
    """Make ``step()`` create missing state and update nothing: a real step would count, and decay the weights."""
    global state_only
    before, state_only = state_only, True
    try:
        yield
    finally:
        state_only = before
