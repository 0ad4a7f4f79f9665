"""The progress of a training: the lines in the log of a job, and the time that is left."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch

from ds_vrgd_recipes.run import progress
from ds_vrgd_recipes.run.progress import Progress, peak_memory_gb


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def train(shown: Progress, clock: Clock, phase: int, first: int, last: int, seconds: float) -> None:
    with shown.phase(phase, f"phase {phase + 1}", first):
        for _ in range(first, last):
            clock.now += seconds
            shown.made({"loss": "2.5"}, {"tokens": 4096.0}, seconds / 2)  # of which half is waiting


def test_off_a_terminal_there_are_whole_lines_every_ten_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    job_log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", job_log)
    train(Progress([10, 2], [1.0, 4.0]), clock, 0, 0, 10, seconds=4.0)
    lines = job_log.getvalue().splitlines()
    assert "\r" not in job_log.getvalue()
    # Updates 1, 4, 7 and 10: four seconds each, ten between lines, and the last of the phase.
    assert [re.search(r"update (\d+) of 12", line)[1] for line in lines] == ["1", "4", "7", "10"]  # type: ignore[index]
    assert lines[0] == "phase 1: update 1 of 12, loss 2.5, tokens/s 2,048, 0:01:08 left"  # 9 + 2 x 4 more, 4 s each
    assert "tokens/s 2,048," in lines[1]  # 3 x 4096 in 6 s
    assert lines[-1].endswith("0:00:32 left")


def test_the_rest_of_the_run_is_estimated_from_its_work(clock: Clock) -> None:
    shown = Progress([4, 2], [1.0, 8.0], silent=True)
    train(shown, clock, 0, 2, 4, seconds=3.0)  # a resumed run
    assert shown.seconds_left() == 2 * 8 * 3.0
    clock.now += 2.0  # an evaluation
    train(shown, clock, 1, 0, 1, seconds=32.0)
    assert shown.seconds_left() == pytest.approx(8 * 40.0 / 10)


def test_a_terminal_has_a_bar_and_a_silent_rank_nothing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    train(Progress([3], [1.0], silent=True), clock, 0, 0, 3, seconds=20.0)
    assert terminal.getvalue() == ""
    train(Progress([3], [1.0]), clock, 0, 0, 3, seconds=20.0)
    assert "\r" in terminal.getvalue()
    assert "of 3" not in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "left=0:00:00" in terminal.getvalue()


def test_memory_is_that_of_this_process() -> None:
    before = peak_memory_gb(torch.device("cpu"))
    assert 0.05 < before < 64
    held = torch.ones(int(before * 0.25e9))  # as much again
    assert peak_memory_gb(torch.device("cpu")) > 1.2 * before
    del held
