"""docs/EXACTNESS.md: DeepSpeed's part first, then a section for each other engine, written by that engine's tests."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "EXACTNESS.md"
DEEPSPEED, FSDP2, MEGATRON = "# Exactness\n", "## FSDP2\n", "## Megatron-Core\n"


def parts() -> dict[str, str]:
    """Return the parts of the page by the heading that each begins with."""
    cut = re.split(f"^({DEEPSPEED}|{FSDP2}|{MEGATRON})", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {heading: heading + text for heading, text in zip(cut[1::2], cut[2::2], strict=True)}


def write(text: str) -> None:
    """Replace the part of the page that begins with the same heading, or add it."""
    written = parts() | {text.partition("\n")[0] + "\n": text}
    PAGE.write_text("\n\n".join(part.strip("\n") for part in written.values()) + "\n", encoding="utf-8")


def rows(text: str) -> list[str]:
    """Return the rows of a part's tables without their figures: what was run."""
    return [re.sub(r"\d\.\de-\d\d|-|FAILED", "", line) for line in text.splitlines() if line.startswith("| ")]
