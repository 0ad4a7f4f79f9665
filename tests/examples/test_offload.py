from __future__ import annotations

from tests.examples.launch import losses, run_example


def test_it_learns_more_than_frequencies() -> None:
    printed = run_example("offload", 2)
    assert "k = 8; " in printed, printed
    assert "MB on {'cpu'}" in printed, printed
    learned, frequencies = losses(printed)
    assert learned < frequencies, printed
