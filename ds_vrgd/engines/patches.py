"""The methods of an engine, its wrapper or its model that are followed while an optimizer of ours is attached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def _nothing() -> None:
    pass


class Patches:
    """The methods of single objects whose calls are followed. A later patch of a method is outside the earlier ones."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def instead(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Call ``function`` in the place of ``owner.name``, with that and the arguments of the call."""
        original, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, functools.wraps(original)(functools.partial(function, original)))
        self._undo.append(functools.partial(setattr, owner, name, original) if own else lambda: delattr(owner, name))

    def within(self, owner: Any, name: str, context: Callable[..., AbstractContextManager[None]]) -> None:
        """Run every call of ``owner.name`` inside ``context``, which is given the arguments of the call."""

        def followed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with context(*args, **kwargs):
                return original(*args, **kwargs)

        self.instead(owner, name, followed)

    def follow(
        self, owner: Any, name: str, *, before: Callable[[], Any] = _nothing, after: Callable[[], Any] = _nothing
    ) -> None:
        """Call ``before`` before every call of ``owner.name``, and ``after`` after every successful one."""

        @contextmanager
        def context(*args: Any, **kwargs: Any) -> Iterator[None]:
            before()
            yield
            after()

        self.within(owner, name, context)

    def undo(self) -> None:
        """Remove all patches, the last one first."""
        while self._undo:
            self._undo.pop()()
