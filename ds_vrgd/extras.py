"""What is not installed is named together with the extra that brings it."""

from __future__ import annotations

from importlib.util import find_spec


class MissingExtra(ModuleNotFoundError):
    """A package of an extra of ds_vrgd is not installed. The message names both, and the command."""


def need(extra: str, *modules: str) -> None:
    """Check that packages are installed, without importing them.

    Args:
        extra: of ds_vrgd, which brings them.
        modules: their top-level modules.

    Raises:
        MissingExtra: one of them is not there.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"{', '.join(missing)} not installed; the extra {extra!r} brings what is needed here: "
            f"pip install 'ds_vrgd[{extra}]'",
            name=missing[0],
        )
