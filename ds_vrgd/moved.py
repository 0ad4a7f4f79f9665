"""The old import paths: each warns, and is the module that has replaced it. And the modules that load late."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

#: Old name -> new name. A module below an old name is looked for below the new one.
MOVED = {
    "ds_vrgd.zero": "ds_vrgd.engines.deepspeed",
    "ds_vrgd.integrations": "ds_vrgd",
    "ds_vrgd.bert": "ds_vrgd_recipes.bert",
    "ds_vrgd.clicks": "ds_vrgd_recipes.clicks",
    "ds_vrgd.vision": "ds_vrgd_recipes.vision",
    "ds_vrgd.training": "ds_vrgd_recipes.run",
    "ds_vrgd.meter": "ds_vrgd.noise",
    "ds_vrgd.statistics": "ds_vrgd.noise",
    "ds_vrgd.cli.main": "ds_vrgd_cli",
    "ds_vrgd.cli.plan": "ds_vrgd_recipes.cli.plan",
    "ds_vrgd.cli.plot": "ds_vrgd_recipes.cli.plot",
    "ds_vrgd.cli.suggest": "ds_vrgd_recipes.cli.suggest",
    "ds_vrgd.doctor.cluster": "ds_vrgd_recipes.preflight.cluster",
    "ds_vrgd.doctor.node": "ds_vrgd_recipes.preflight.node",
    "ds_vrgd.doctor.readiness": "ds_vrgd_recipes.preflight.readiness",
    "ds_vrgd.engines.deepspeed.saving": "ds_vrgd_recipes.run.saving",
    "benchmarks.evidence": "evidence",
}
#: Modules that ``import ds_vrgd`` leaves to their first use: some need a further package.
LATE = {"hf", "megatron", "schedules"}
#: Modules between the line that imports an old name and :class:`Finder`.
_BETWEEN = {__name__, "ds_vrgd", "importlib", "importlib.util", "importlib._bootstrap", "runpy"}


def new_name(name: str) -> str | None:
    """Return where a module is now; None if it has not moved."""
    moves = (new + name.removeprefix(old) for old, new in MOVED.items() if f"{name}.".startswith(f"{old}."))
    return next(moves, None)


class Finder(MetaPathFinder, Loader):
    """Finds modules by their old names: the module under the new name becomes the module of both."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that has moved, and warn about the line that imports it.

        Raises:
            ModuleNotFoundError: the distribution that has the module now is not installed.
        """
        new = new_name(name)
        if new is None:
            return None
        top = new.partition(".")[0]
        if find_spec(top) is None:
            way_out = "pip install ds_vrgd_recipes" if top == "ds_vrgd_recipes" else f"{top} is in the repository alone"
            raise ModuleNotFoundError(f"{name} is now {new}, which is not installed: {way_out}", name=new)
        found = find_spec(new)
        if found is None:
            return None
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
            frame = frame.f_back
        where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
        warnings.warn_explicit(f"{name} is now {new}. Import it from there.", FutureWarning, *where)
        return ModuleSpec(name, self, is_package=found.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in the place of this empty one."""
        sys.modules[module.__name__] = importlib.import_module(str(new_name(module.__name__)))

    def get_code(self, name: str) -> CodeType | None:
        """Return the code that ``python -m`` runs."""
        found: Any = find_spec(str(new_name(name)))
        code: CodeType | None = found.loader.get_code(found.name)
        return code


def attribute(name: str) -> ModuleType:
    """Return ``ds_vrgd.name`` if it is a module that loads late or the old name of one; else an AttributeError."""
    if name in LATE or f"ds_vrgd.{name}" in MOVED:
        return importlib.import_module(f"ds_vrgd.{name}")
    raise AttributeError(f"module 'ds_vrgd' has no attribute {name!r}")


def install() -> None:
    """Look for old names first: the path of a package under its new name would give its modules a second time."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
