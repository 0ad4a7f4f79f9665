"""The errors about packages that are not installed, or are of a release that cannot be used."""

from __future__ import annotations

from importlib.util import find_spec


class MissingExtra(ModuleNotFoundError):
    """A package that an extra brings is not installed. The message names both, and the command."""


class UnsupportedRelease(RuntimeError):
    """A package is installed in a release that cannot be used. The message names it, why, and the way out."""


def need(extra: str, *modules: str, distribution: str = "ds_vrgd") -> None:
    """Check that the packages that an extra of ``distribution`` brings are installed, without importing them.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtra(
            f"{', '.join(missing)} not installed; the extra {extra!r} brings what is needed here: "
            f"pip install '{distribution}[{extra}]'",
            name=missing[0],
        )
