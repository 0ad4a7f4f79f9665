"""Constraints for an image whose base has its own torch: what the base has stays; the rest is what the tests ran with.

    python docker/constraints.py constraints/cpu.txt > kept.txt && pip install -c kept.txt ...

With a release in its place, torch would bring a CUDA and an NCCL of its own, without what the base was tuned for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

#: Compiled against the base's torch, and not among our own requirements.
WITH_TORCH = ("torchvision", "torchaudio")


def constraints(lines: list[str]) -> Iterator[str]:
    """Each pin of ``lines``, or in its place the version that is installed."""
    for line in lines:
        pin = line.partition("#")[0].strip()
        if pin:
            yield installed(Requirement(pin).name) or pin
    yield from filter(None, map(installed, WITH_TORCH))


def installed(name: str) -> str | None:
    """``name==version`` of what is installed, None if it is not."""
    try:
        return f"{name}=={metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text(encoding="utf-8").splitlines())))
