from __future__ import annotations

import pytest

from tests.examples.launch import losses, run_example


@pytest.mark.parametrize("name, ranks", [("hf_trainer", 2), ("hf_trainer", 1), ("hf_accelerate", 2)])
def test_it_learns_more_than_frequencies(name: str, ranks: int) -> None:
    printed = run_example(name, ranks)
    learned, frequencies = losses(printed)
    assert learned < frequencies, printed
