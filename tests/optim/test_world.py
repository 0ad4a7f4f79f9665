"""What a program sees that has not set up logging, and one that has."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest

from ds_vrgd.optim import VRSGD, VRAdamW, world
from tests.support.model import batches, make_model


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """The package's logger as a program finds it that has set up no logging, as pytest has."""
    found = logging.getLogger("ds_vrgd")
    level = found.level
    found.setLevel(logging.NOTSET)
    monkeypatch.setattr(found, "hasHandlers", lambda: False)
    yield found
    found.setLevel(level)


def test_a_line_is_seen_without_any_setup(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("one", "two"):
        world.announce(line)
    assert capsys.readouterr().err == "ds_vrgd: one\nds_vrgd: two\n"


def test_a_program_may_turn_it_off(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.WARNING)
    world.announce("one")
    assert capsys.readouterr().err == ""


def test_a_program_that_has_set_up_logging_decides_itself(caplog: pytest.LogCaptureFixture) -> None:
    world.announce("one")  # the root logger's level is WARNING
    with caplog.at_level(logging.INFO):
        world.announce("two")
    assert caplog.messages == ["two"]
    assert logging.getLogger("ds_vrgd").level == logging.NOTSET


@pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k")
def test_the_first_step_in_plain_pytorch_says_what_is_trained(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    optimizer = VRAdamW(model.parameters())
    for step in range(2):
        for tokens in batches(step, 4):
            (model(tokens) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"ds_vrgd: VRAdamW: k = 4 \(1 rank x 4 micro-batches\) in the first step; one process, GSNR through hooks; "
        r"9 layers, 1,715 parameters", line,
    )  # fmt: skip


def test_without_gsnr_it_says_nothing(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model()
    optimizer = VRSGD(model.parameters(), gamma=1.0)
    model(batches(0, 1)[0]).backward()
    optimizer.step()
    assert capsys.readouterr().err == ""
