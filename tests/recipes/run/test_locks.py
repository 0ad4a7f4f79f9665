"""One process at a time in a folder: who holds it, what ends that, and folders in one another."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_recipes.run import locks
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.locks import LOCK, locked, locked_output


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PATIENCE", 0.3)


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in another process, and wait until it writes a file "ready" in the working directory."""
    Path("ready").unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    end = time.monotonic() + 30
    while not Path("ready").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return child


def hold() -> None:
    """Train in "out" for ever, with a process that loads data."""
    with locked_output(Path("out"), "training"):
        if not os.fork():
            Path("loader").write_text(str(os.getpid()))
            Path("ready").touch()
            time.sleep(60)
        time.sleep(60)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that trains in "out", under the working directory."""
    monkeypatch.chdir(tmp_path)
    holder = fork(hold)
    yield holder
    for process in (holder, int(Path("loader").read_text())):
        if os.path.exists(f"/proc/{process}"):
            os.kill(process, signal.SIGKILL)
    if os.path.exists(f"/proc/{holder}"):
        os.waitpid(holder, 0)


def test_a_second_run_is_told_who_holds_the_output(held: int) -> None:
    who = rf"another process is training \(process {held} on {socket.gethostname()}, since 20\d\d-.*\), in "
    Path("link").symlink_to("out")
    for name in ("out", "link"):
        with (
            pytest.raises(InputError, match=who + rf"{name}; wait until it has ended, or"),
            locked_output(Path(name), "x"),
        ):
            pass
    assert os.listdir("out") == [LOCK]


@pytest.mark.parametrize("name", ["out/sub", "out/checkpoints/universal", "out/data/squad", "link/sub"])
def test_an_output_inside_one_that_is_held(held: int, name: str) -> None:
    Path("link").symlink_to("out")
    expected = rf"--output {name} is inside .*out, where another process is training \(process {held} on"
    with pytest.raises(InputError, match=expected), locked_output(Path(name), "fine-tuning"):
        pass
    assert os.listdir("out") == [LOCK]
    with locked(Path("out/data.partial"), "preparing data"):  # shared data may be in there
        pass


def test_kill_9_of_the_holder_ends_it_while_its_loader_lives(held: int) -> None:
    os.kill(held, signal.SIGKILL)
    os.waitpid(held, 0)
    os.kill(int(Path("loader").read_text()), 0)  # lives
    with locked_output(Path("out"), "training"):
        assert str(os.getpid()) in Path("out", LOCK).read_text()
    assert not Path("out", LOCK).exists()


def test_a_stopped_holder_is_waited_for(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a requeued job does whose first copy is about to end."""
    monkeypatch.setattr(locks, "_PATIENCE", 30.0)
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({held}, 9)"])
    with locked_output(Path("out"), "training"):
        assert killer.wait() == 0


def test_nothing_is_left_of_a_folder_that_was_not_used(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked_output(tmp_path / "a" / "out", "training"):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
    with locked_output(tmp_path / "out", "training"):
        (tmp_path / "out" / "log.jsonl").touch()
        with locked_output(tmp_path / "out" / "sub", "training"):  # of this very process
            pass
    assert os.listdir(tmp_path / "out") == ["log.jsonl"]


def test_a_folder_that_is_renamed_loses_its_lock(tmp_path: Path) -> None:
    with locked(tmp_path / "data.partial", "preparing data"):
        (tmp_path / "data.partial" / "manifest.json").touch()
        (tmp_path / "data.partial").rename(tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(tmp_path / "data") == ["manifest.json"]


def test_a_lock_that_its_holder_removes_is_not_taken_for_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, the file may lose its name: two could hold one lock each."""
    flock, calls = fcntl.flock, []

    def late(descriptor: int, kind: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(kind)
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path, "training"):
        assert len(calls) == 2
        with pytest.raises(InputError, match="another process is training"), locked(tmp_path, "training"):
            pass


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with locked_output(tmp_path / "out", "training"):
        pass
    assert "out has no locks (No locks available): nothing keeps other runs out" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 3}', "\xff"])
def test_a_holder_that_has_not_named_itself(tmp_path: Path, content: str) -> None:
    with locked(tmp_path, "training"):
        (tmp_path / LOCK).write_text(content, encoding="latin-1")
        with pytest.raises(InputError, match="another process is at work, in"), locked(tmp_path, "training"):
            pass


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, expected in (
        ("file", "file is a file; give a folder"),
        ("file/out", "cannot be written .Not a directory"),
    ):
        with pytest.raises(InputError, match=expected), locked_output(tmp_path / name, "training"):
            pass
