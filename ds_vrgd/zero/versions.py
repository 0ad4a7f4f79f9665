"""The DeepSpeed releases that this package was run against."""

from __future__ import annotations

import deepspeed
from packaging.version import Version

OLDEST = "0.19.8"
BELOW = "0.20"


def check_version(version: str = deepspeed.__version__) -> None:
    """Refuse a DeepSpeed that was never tried.

    Raises:
        RuntimeError: naming the version found and the range that is supported.
    """
    release = Version(Version(version).base_version)
    if not Version(OLDEST) <= release < Version(BELOW):
        raise RuntimeError(
            f"DeepSpeed {version} is outside the tested range >={OLDEST},<{BELOW}: its gradient path may differ in "
            f"ways that would make the statistics silently wrong. Install 'deepspeed>={OLDEST},<{BELOW}'."
        )
