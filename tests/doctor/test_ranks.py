"""A rank that fails, dies or hangs ends the others, and is named."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from ds_vrgd.doctor.ranks import RankFailed, run_on_ranks


def misbehave(how: str) -> int:
    if torch.distributed.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("of rank 1")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return int(value)


@pytest.mark.parametrize(
    ("how", "timeout_s", "summary"),
    [
        ("raise", 60.0, "rank 1 failed: ArithmeticError: of rank 1"),
        ("die", 60.0, "rank 1 was ended by SIGKILL"),
        ("hang", 4.0, "the ranks were not done after 4 s"),
    ],
)
def test_failure_ends_all_ranks_and_is_told(how: str, timeout_s: float, summary: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_on_ranks(2, misbehave, how, timeout_s=timeout_s)
    assert time.monotonic() - begin < 60
    assert caught.value.summary.startswith(summary)
    if how == "hang":
        assert "rank 1 was here:" in str(caught.value)
        assert "in misbehave" in str(caught.value)
