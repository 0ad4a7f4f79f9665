"""examples/megatron_gpt.py, run as its first lines say."""

from __future__ import annotations

import re

import pytest

from tests.examples.launch import losses, run_by_torchrun


@pytest.mark.slow
def test_it_learns() -> None:
    printed = run_by_torchrun("-m", "tests.engines.megatron.without_cuda", "examples/megatron_gpt.py")
    loss, alone = losses(printed)
    assert loss < alone
    assert re.search(r"k = 2, mean GSNR over the layers \d", printed)
