"""Kernels run compiled on the GPU with ``DS_VRGD_TEST_DEVICE=cuda``, else in Triton's interpreter.

The interpreter is chosen when Triton is imported, so the tests of kernels have a process of their own
(``test_interpreter.py`` starts it), and the rest of the suite never sees it.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("DS_VRGD_TEST_DEVICE", "cpu"))
COMPILED = DEVICE.type == "cuda"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = ["test_i*.py" if COMPILED or INTERPRETED else "test_[!i]*.py"]


@pytest.fixture
def device() -> torch.device:
    return DEVICE
