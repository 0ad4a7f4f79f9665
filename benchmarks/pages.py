"""Generated parts of Markdown pages: tables, and the lines between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a Markdown table; the first column is text, the others are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)] + [""]


def replace_between(page: Path, name: str, lines: Sequence[str]) -> None:
    """Put ``lines`` between the page's markers ``<!-- name: begin -->`` and ``<!-- name: end -->``.

    Raises:
        ValueError: the page lacks a marker.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = page.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{page} lacks the marker {begin} or {end}")
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(before + begin + "\n\n" + "\n".join(lines).strip() + "\n\n" + end + after)
