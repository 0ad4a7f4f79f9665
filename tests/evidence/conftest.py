"""A text on which several tests of experiments train."""

from __future__ import annotations

import pytest

from evidence.language_model import Text
from tests.evidence.counting import counting_text


@pytest.fixture(scope="session")
def text() -> Text:
    """Return the text of ``counting_text``."""
    return counting_text()
