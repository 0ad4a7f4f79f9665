"""Starts the other tests of this folder in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


def test_kernels_in_the_interpreter() -> None:
    """A process a file, all at once: none of them uses more than one core."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    runs = [
        subprocess.Popen(
            [*command, str(path)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=HERE.parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for path in sorted(HERE.glob("test_[!i]*.py"))  # as in conftest.py
    ]
    said = [run.communicate()[0] for run in runs]
    failed = [text[-8000:] for run, text in zip(runs, said, strict=True) if run.returncode]
    assert runs
    assert not failed, "\n".join(failed)
