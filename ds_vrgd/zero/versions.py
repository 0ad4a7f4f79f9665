"""The releases of DeepSpeed and torch that this package was run against: the one place that says so.

``pyproject.toml`` asks for the same (a test compares), and docs/COMPATIBILITY.md has what was measured with each.
"""

from __future__ import annotations

import os
import warnings

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

#: Before 0.19 the mean that DeepSpeed itself hands over is wrong in several configurations, other ones in each release.
DEEPSPEED = ">=0.19.0,<0.20"
TORCH = ">=2.6"
#: Older ones call no tensor hook for a parameter of an autograd.Function inside a non-reentrant checkpoint; DeepSpeed's
#: own linear layer at stage 3 is one.
HOOKS = ">=2.10"
#: Where fused mode may replace DeepSpeed's reduction; observe mode serves the others.
FUSED = ">=0.19.8,<0.20"

#: Set to 1, it turns the error into a warning.
OVERRIDE = "DS_VRGD_ANY_VERSION"

RISK = (
    "DeepSpeed's gradient path may differ there in ways that no check of ds_vrgd notices: gradients, statistics and "
    "updates may be silently wrong, and checkpoints may not load"
)


def check_versions(deepspeed: str, torch: str) -> None:
    """Refuse a DeepSpeed or a torch that was never tried, or that was found to be wrong.

    Args:
        deepspeed: ``deepspeed.__version__``.
        torch: ``torch.__version__``.

    Raises:
        RuntimeError: naming each version found, the range that is supported, and the override.
    """
    outside = [
        f"{name} {version} is not among the supported releases, {name.lower()}{supported}"
        for name, version, supported in (("DeepSpeed", deepspeed, DEEPSPEED), ("torch", torch, TORCH))
        if not is_among(version, supported)
    ]
    if not outside:
        if not is_among(torch, HOOKS):
            warnings.warn(
                f"torch {torch} hides the gradients of an autograd.Function inside a non-reentrant activation "
                "checkpoint from ds_vrgd's observe mode, which would take them for zero. Use use_reentrant=True there, "
                f"or torch{HOOKS}.",
                stacklevel=2,
            )
        return
    found = "; ".join(outside)
    if os.environ.get(OVERRIDE) == "1":
        warnings.warn(f"{found}. {OVERRIDE}=1 is set, so ds_vrgd goes on. {RISK}.", stacklevel=2)
        return
    raise RuntimeError(
        f"{found} (docs/COMPATIBILITY.md has what was measured with which). Install one of those, or set "
        f"{OVERRIDE}=1 to go on at your own risk. {RISK}."
    )


def is_among(version: str, supported: str) -> bool:
    """Whether a release is; a development or local build counts as the release that it names.

    A build that names none (a source tree says 0.0.0 or "unknown") is not.
    """
    try:
        return Version(Version(version).base_version) in SpecifierSet(supported)
    except InvalidVersion:
        return False
