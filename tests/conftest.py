"""The environment that every test needs: DeepSpeed on CPU (or ``DS_VRGD_TEST_DEVICE``), one thread a process."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DS_ACCELERATOR", os.environ.get("DS_VRGD_TEST_DEVICE", "cpu"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-exactness", action="store_true", help="write the exactness table to docs/EXACTNESS.md")
    parser.addoption("--write-combinations", action="store_true", help="write the pair table to docs/COMBINATIONS.md")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the exactness table, where it was measured."""
    from tests.engines.deepspeed.table import ExactnessTable

    table = config.stash.get(ExactnessTable.key, None)
    if table is not None:
        terminalreporter.section("exactness: |theta - theta_ref| / |theta_ref| after 5 steps, ranks x micro-batches")
        for line in table.matrix() + table.variants():
            terminalreporter.write_line(line)
