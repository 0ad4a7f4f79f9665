from __future__ import annotations

import pytest

from tests.examples.launch import losses, run_example

ALONE = pytest.param("hf_trainer", 1, marks=pytest.mark.slow)


@pytest.mark.parametrize("name, ranks", [("hf_trainer", 2), ("hf_accelerate", 2), ALONE])
def test_it_learns_more_than_frequencies(name: str, ranks: int) -> None:
    printed = run_example(name, ranks)
    learned, frequencies = losses(printed)
    assert learned < frequencies, printed
