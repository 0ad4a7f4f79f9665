from __future__ import annotations

from tests.examples.launch import losses, run_example


def test_it_learns_more_than_frequencies() -> None:
    printed = run_example("moe", 2)
    assert "k = 16; the first rank holds experts 0, 1 of 4" in printed, printed
    learned, frequencies = losses(printed)
    assert learned < frequencies, printed
