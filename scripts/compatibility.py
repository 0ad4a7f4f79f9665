"""Compare several releases of DeepSpeed with the dense float64 reference, and write docs/COMPATIBILITY.md.

    python scripts/compatibility.py 0.19.8

Each release is installed into a folder of its own (--folder) and runs the cases of
tests/engines/deepspeed/compatibility.py with the environment's torch, two ranks on the CPU. A release outside the
supported range runs under DS_VRGD_ANY_VERSION=1. The folder keeps the results of each release; --again measures
anew. For another torch, run `python -m tests.engines.deepspeed.compatibility FILE` in an environment that has it, and
add the file with --also.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")


def main() -> None:
    """Install the releases, measure them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="releases of DeepSpeed")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "out" / "compatibility", help="releases and their results"
    )
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="files of results from other environments")
    parser.add_argument("--again", action="store_true", help="measure again the releases that have results")
    arguments = parser.parse_args()
    outcomes = []
    for version in arguments.versions:
        packages, outcome = arguments.folder / f"deepspeed-{version}", arguments.folder / f"{version}.json"
        install(version, packages)
        if arguments.again or not outcome.exists():
            measure(packages, outcome)
        outcomes.append(outcome)
    measured = [json.loads(path.read_text(encoding="utf-8")) for path in (*outcomes, *arguments.also)]
    from tests.engines.deepspeed.compatibility_page import document

    (ROOT / "docs" / "COMPATIBILITY.md").write_text(document(measured), encoding="utf-8")


def install(version: str, folder: Path) -> None:
    """Install one release of DeepSpeed, without its dependencies and without compiling anything."""
    if not folder.exists():
        subprocess.run(
            [*PIP, "--target", str(folder), f"deepspeed=={version}"],
            env=os.environ | {"DS_BUILD_OPS": "0"},
            check=True,
        )


def measure(packages: Path, outcome: Path) -> None:
    """Run the cases in a process that finds this DeepSpeed first."""
    subprocess.run(
        [sys.executable, "-m", "tests.engines.deepspeed.compatibility", str(outcome)],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT), str(ROOT / "recipes"))),
            "DS_VRGD_ANY_VERSION": "1",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        },
        check=True,
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
