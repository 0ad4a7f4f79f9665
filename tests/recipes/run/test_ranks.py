"""What one rank meets alone: the others learn of it at once, and every message has a name on it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_vrgd.engines.deepspeed import CheckpointError
from ds_vrgd_recipes.run import ranks as module
from ds_vrgd_recipes.run.checkpoint import Resumption
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.run.start import fitting, open_log
from tests.support.ranks import run_on_ranks


class Unpicklable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


CASES: dict[str, Callable[[], Any]] = {
    "input": failing(InputError("lr=3 is wrong")),
    "key": failing(KeyError("ranks")),
    "exit": failing(SystemExit(3)),
    "interrupt": failing(KeyboardInterrupt()),
    "unpicklable": failing(Unpicklable(1, 2)),
    "result": lambda: lambda: None,  # cannot be sent
}


def outcome(work: Callable[[], Any]) -> str:
    try:
        return f"{work()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


class Engine:
    monitor = None


def on_a_rank(rank: int, folder: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    ranks = Ranks()
    started = time.monotonic()
    for name, work in CASES.items():
        said[name] = outcome(lambda work=work: ranks.on_rank_zero(work))  # type: ignore[misc]
    said["after"] = ranks.on_rank_zero(lambda: 3)
    said["seconds"] = time.monotonic() - started
    # A log that rank 0 alone reads is damaged.
    Path(folder, "log.jsonl").write_text("damaged\n")
    torch.distributed.barrier()
    said["log"] = outcome(lambda: open_log(ranks, Path(folder), 0, Engine(), ()))
    # A checkpoint that was cut anew cannot be loaded.
    resumption = Resumption(Path(folder), "step-000003", 3, 7)
    Path(folder, "step-000003").mkdir(exist_ok=True)
    Path(folder, "step-000003", "a_optim_states.pt").touch()

    def convert(source: Path, target: Path, tag: str) -> None:
        (target / tag).mkdir(parents=True)

    def load(error: Exception | None) -> bool:
        with fitting(resumption, ranks, Path(folder), {}) as converted:
            there = (converted.folder / converted.tag).is_dir()
            torch.distributed.barrier()
            if error is not None:
                raise error
        return there

    with patch("ds_vrgd_recipes.run.start.to_universal", convert):
        said["converted"] = [outcome(lambda: load(None)), outcome(lambda: load(InputError("bits flipped")))]
        torch.distributed.barrier()
        said["left"] = Path(folder, "checkpoints", "universal").exists()
    with patch("ds_vrgd_recipes.run.start.to_universal", lambda *_: failing(CheckpointError("no"))()):
        said["refused"] = outcome(lambda: load(None))
    # What each prints: all fail alike; each otherwise; then the last one alone.
    said["alike"] = ranks.messages("lr is wrong")
    said["otherwise"] = Ranks().messages("lr is wrong" if rank == 0 else "no such file")
    another = Ranks()
    if rank == 1:
        with patch.object(module, "_REPORT_TIMEOUT", timedelta(seconds=0.5)):
            said["alone"] = another.messages("no such file")
    said["later"] = ranks.on_rank_zero(lambda: 4)  # in which rank 0 has waited all the while
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(2, on_a_rank, str(tmp_path_factory.mktemp("ranks")))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("input", "InputError: lr=3 is wrong", "InputError: lr=3 is wrong"),
        ("key", "KeyError: 'ranks'", "TrainingFailed: rank 0 failed: KeyError: 'ranks'"),
        ("exit", "SystemExit: 3", "TrainingFailed: rank 0 failed: SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: ", "TrainingFailed: rank 0 failed: KeyboardInterrupt: "),
        ("unpicklable", "Unpicklable: 1 and 2", "TrainingFailed: rank 0 failed: Unpicklable: 1 and 2"),
    ],
)
def test_an_exception_of_any_kind_on_rank_0_is_every_ranks(
    said: list[dict[str, Any]], name: str, first: str, second: str
) -> None:
    assert [one[name] for one in said] == [first, second]


def test_a_result_that_cannot_be_sent_leaves_nobody_waiting(said: list[dict[str, Any]]) -> None:
    assert said[1]["result"].startswith("TrainingFailed: rank 0 failed: ")
    assert not said[0]["result"].startswith("TrainingFailed")
    assert [one["after"] for one in said] == [3, 3]
    assert max(one["seconds"] for one in said) < 10.0


def test_a_log_that_rank_0_cannot_read_stops_all(said: list[dict[str, Any]]) -> None:
    assert said[0]["log"] == said[1]["log"]
    assert "log.jsonl is damaged: line 1 holds b'damaged'" in said[0]["log"]


def test_a_converted_checkpoint_is_removed_whatever_comes_of_it(said: list[dict[str, Any]]) -> None:
    for one in said:
        assert one["converted"] == ["True", "InputError: bits flipped"]
        assert one["left"] is False
        assert one["refused"].endswith("with 2 ranks: no")


def test_each_error_is_printed_once_and_by_its_rank_where_it_is_alone(said: list[dict[str, Any]]) -> None:
    named = f"rank 1 on {socket.gethostname()}: no such file"
    assert [one["alike"] for one in said] == [["lr is wrong"], []]
    assert [one["otherwise"] for one in said] == [["lr is wrong", named], []]
    assert said[1]["alone"] == [named]
    assert [one["later"] for one in said] == [4, 4]
