"""A rank that fails, dies or hangs ends the others, and is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_vrgd.doctor.ranks import RankFailed, run_on_ranks


def misbehave(how: str) -> int:
    if torch.distributed.get_rank() == 1:
        if how == "raise":
            raise ArithmeticError("of rank 1")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(600)
    value = torch.ones(1)
    torch.distributed.all_reduce(value)
    return int(value)


@pytest.mark.parametrize(
    ("how", "timeout_s", "summary"),
    [
        ("raise", 240.0, "rank 1 failed: ArithmeticError: of rank 1"),
        ("die", 240.0, "rank 1 was ended by SIGKILL"),
        pytest.param("hang", 4.0, "the ranks were not done after 4 s", marks=pytest.mark.slow),
    ],
)
def test_failure_ends_all_ranks_and_is_reported(how: str, timeout_s: float, summary: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_on_ranks(2, misbehave, how, timeout_s=timeout_s)
    assert time.monotonic() - begin < 200
    assert caught.value.summary.startswith(summary)
    if how == "hang":
        assert "rank 1 was here:" in str(caught.value)
        assert "in misbehave" in str(caught.value)


def wait_forever(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    code = (
        "from ds_vrgd.doctor.ranks import run_on_ranks; from tests.doctor.test_ranks import wait_forever\n"
        f"if __name__ == '__main__': run_on_ranks(2, wait_forever, {str(tmp_path / 'pids')!r})"
    )
    (tmp_path / "pids").mkdir()
    (tmp_path / "start.py").write_text(code, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(tmp_path / "start.py")], env=environment) as starter:
        end = time.monotonic() + 200
        while len(pids := [int(path.name) for path in (tmp_path / "pids").iterdir()]) < 2:
            assert starter.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        starter.kill()
    while any(Path(f"/proc/{pid}").exists() and is_running(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Return whether a process is more than a zombie, which a container may leave."""
    return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
