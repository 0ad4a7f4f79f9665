"""The lines that the package logs."""

from __future__ import annotations

import logging


class Log(logging.Handler):
    """A handler that keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
