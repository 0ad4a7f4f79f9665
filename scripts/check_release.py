"""List what must be changed before a release: addresses that do not exist yet, and words that a release makes untrue.

    python scripts/check_release.py

The repository and the registry of the images have no public address yet. Wherever one belongs, the files name the host
``ds-vrgd.invalid``, a domain that never resolves (RFC 2606). While a place is left, each has a line, and the exit
status is 1.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "ds-vrgd.invalid"
UNRELEASED = "until the first release"
#: Files that are about the placeholder.
ABOUT_IT = ("scripts/check_release.py", "tests/docs/test_release.py")


def places(root: Path = ROOT) -> list[str]:
    """Return ``file:line:text`` of every place in a repository's tracked files."""
    left_out = [f":!{name}" for name in ABOUT_IT]
    found = subprocess.run(
        ["git", "grep", "-n", "-I", "--fixed-strings", "-e", PLACEHOLDER, "-e", UNRELEASED, "--", ".", *left_out],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode > 1:
        raise SystemExit(found.stderr)
    return found.stdout.splitlines()


def main() -> int:
    """Print the places; 1 if there are any."""
    found = places()
    for place in found:
        print(place)
    if found:
        print(
            f"\n{len(found)} places: put the public address for {PLACEHOLDER}, and rewrite the others", file=sys.stderr
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
