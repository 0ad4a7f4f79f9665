"""The progress of a stage of the preparation: a bar on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts characters of text, and reports their number and speed at the end.

    Args:
        total: characters to come, if known.
    """

    def __init__(self, stage: str, report: Callable[[str], None], total: int | None = None) -> None:
        self._stage, self._report, self._total = stage, report, total
        self._done = 0
        self._begin = self._last = time.monotonic()
        self._bar = tqdm(
            desc=stage, total=total, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, disable=None
        )

    def add(self, characters: int) -> None:
        """Count some more."""
        self._done += characters
        self._bar.update(characters)
        if not sys.stderr.isatty() and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._report(self._line("..."))

    def _line(self, end: str) -> str:
        share = f" ({self._done / self._total:.0%})" if self._total and self._done < self._total else ""
        speed = self._done / 1e6 / max(time.monotonic() - self._begin, 1e-9)
        return f"{self._stage}: {self._done / 1e6:,.1f} MB{share}, {speed:,.1f} MB/s{end}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if error is None:
            self._report(self._line(""))
