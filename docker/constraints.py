"""Write constraints for an image whose base has its own torch: its packages stay, the others are as tested.

    python docker/constraints.py constraints/cpu.txt > kept.txt && pip install -c kept.txt ...

A release of torch in its place would bring its own CUDA and NCCL, and lose what the base was tuned for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

#: Packages compiled against the base's torch that are not among this project's requirements.
WITH_TORCH = ("torchvision", "torchaudio")


def constraints(lines: list[str]) -> Iterator[str]:
    """Yield each pin of ``lines``, or the installed version in its place."""
    for line in lines:
        pin = line.partition("#")[0].strip()
        if pin:
            yield installed(Requirement(pin).name) or pin
    yield from filter(None, map(installed, WITH_TORCH))


def installed(name: str) -> str | None:
    """Return ``name==version`` of an installed package; None if it is not installed."""
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())))
