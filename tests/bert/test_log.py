"""The picture of a pre-training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_vrgd.bert.log import MONITORED, plot
from ds_vrgd.training.log import RunLog
from tests.training.test_log import Monitor


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "phase": 1,
        "loss": 2.0 / step,
        "masked_lm_loss": 1.0 / step,
        "next_sentence_loss": 1.0 / step,
        "lr": 0.1 * step,
        "sequences_per_second": 5.0,
        "gsnr": {"k": 8, "mean_ratio": 0.3, "clamped_low": 0.2, "clamped_high": 0.1},
    }


@pytest.mark.parametrize("gsnr", [True, False])
def test_picture(tmp_path: Path, gsnr: bool) -> None:
    written = RunLog(tmp_path, 0, Monitor(), MONITORED)
    for step in (1, 2, 3):
        written.update({name: value for name, value in record(step).items() if gsnr or name != "gsnr"})
    written.evaluation(3, {"held_out_masked_lm_loss": 1.5, "unigram_entropy": 1.6})
    assert plot(tmp_path).read_bytes().startswith(b"\x89PNG")
