"""Register the optimizers of ds_vrgd with DeepSpeed in programs that do not import ds_vrgd.

PyTorch calls :func:`start` at the end of ``import torch`` (entry points of the group ``torch.backends``). Nothing more
happens until a program builds its first DeepSpeed engine: only then is ds_vrgd imported. ``DS_VRGD_AUTOLOAD=0`` turns
this off, and so does PyTorch's own ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.

An error here would break ``import torch``. So nothing is raised, and no more than the standard library is imported.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

#: The environment variable that turns this off if it is 0.
SWITCH = "DS_VRGD_AUTOLOAD"
#: ``deepspeed`` itself may be what imports torch, and is half imported then: wait for the module that has the engine.
ENGINE = "deepspeed.runtime.engine"


def start() -> None:
    """Wait for DeepSpeed's engine to be imported. Never raises an error."""
    if os.environ.get(SWITCH) != "0" and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Leaves every module to the other finders, and has the one with the engine call :func:`prepare` once it is run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != ENGINE or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        try:
            loader: Any = spec.loader  # type: ignore[union-attr]
            run = loader.exec_module

            def run_and_prepare(module: Any) -> None:
                run(module)
                prepare(module)

            loader.exec_module = run_and_prepare
        except AttributeError:  # no such module, or a loader of another kind
            pass
        return spec


def prepare(module: Any) -> None:
    """Have DeepSpeed's engine class import ds_vrgd before the first engine is built."""
    engine = getattr(module, "DeepSpeedEngine", None)
    if engine is None or "ds_vrgd" in sys.modules:
        return
    build = engine.__init__

    @functools.wraps(build)
    def import_and_build(self: Any, *args: Any, **kwargs: Any) -> None:
        is_first = engine.__init__ is import_and_build  # else another library has wrapped it, or the import is done
        if is_first:
            engine.__init__ = build
        _import()
        (engine.__init__ if is_first else build)(self, *args, **kwargs)

    engine.__init__ = import_and_build


def _import() -> None:
    """Import ds_vrgd, which registers its optimizers; warn if it cannot be imported."""
    try:
        import ds_vrgd  # noqa: F401
    except Exception as error:
        warnings.warn(
            f"ds_vrgd is installed, but importing it failed with {type(error).__name__}: {error}. Its optimizers are "
            f"not available in a DeepSpeed JSON. Repair or uninstall ds_vrgd, or set {SWITCH}=0.",
            stacklevel=3,
        )
