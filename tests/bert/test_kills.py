"""kill -9 of one rank at the worst places; what is started again ends bitwise where the run ends that was left alone.

``deepspeed`` is started for real in the tests marked slow; the others start the ranks as it does, and sooner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from ds_vrgd.bert.log import read_log
from tests.bert.cases import run_settings
from tests.bert.launching import FAULTS, ROOT, Launch, different, environment, free_port, launch

CONFIG = ROOT / "configs" / "ds_vrgd.json"
LAST = "checkpoints/step-000006"


@dataclass(frozen=True)
class Reference:
    arguments: list[str]  # all but the output folder's name
    output: Path
    last_line: str


@pytest.fixture(scope="module")
def reference(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("kills")
    run_file = folder / "run.yaml"
    # A worker builds batches, so that a signal to all processes meets it, too.
    settings = run_settings(corpus_folder, loader_workers=1)
    run_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    arguments = ["--config", str(CONFIG), "--run", str(run_file), "--output"]
    whole = launch(2, *arguments, str(folder / "whole"))
    assert whole.status == 0, whole.stderr
    return Reference(arguments, folder / "whole", whole.stdout.splitlines()[-1])


def faulty(rank: int, fault: str, number: int, *arguments: str) -> Launch:
    return launch(2, *arguments, script=(FAULTS, str(rank), fault, str(number)))


def assert_the_same_end(reference: Reference, output: Path, last_line: str) -> None:
    assert last_line == reference.last_line
    assert different(output / LAST, reference.output / LAST) == []
    losses = [[record["loss"] for record in read_log(each) if "loss" in record] for each in (output, reference.output)]
    assert losses[0] == losses[1]


def test_killed_in_preparation_and_in_a_checkpoint(reference: Reference, tmp_path: Path) -> None:
    output = tmp_path / "killed"
    command = [*reference.arguments, str(output)]
    in_preparation = faulty(0, "kill_in_preparation", 20, *command)
    assert in_preparation.statuses[0] == -signal.SIGKILL
    assert in_preparation.statuses[1] != 0  # it did not wait for a dead rank
    assert [path.name for path in output.iterdir()] == ["data.partial"]
    # The same command again. Rank 1 writes one file a checkpoint: the second one is that after update 4.
    in_checkpoint = faulty(1, "kill_in_checkpoint", 2, *command)
    assert in_checkpoint.statuses[1] == -signal.SIGKILL, in_checkpoint.stderr
    assert in_checkpoint.statuses[0] != 0
    left = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert left == ["step-000003", "step-000004.partial"]
    assert (output / "checkpoints" / "latest").read_text(encoding="utf-8") == "step-000003"
    resumed = launch(2, *command, "--resume", str(output))
    assert resumed.status == 0, resumed.stderr
    assert_the_same_end(reference, output, resumed.stdout.splitlines()[-1])
    assert not list(output.rglob("*.partial"))


@contextlib.contextmanager
def deepspeed_launcher(script: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The ``deepspeed`` command with two ranks; whatever it leaves is killed."""
    command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--log_level", "warning", *script]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env={**environment(), "LOCAL_SIZE": "2"}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def family(process: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    """Running descendants with ``name`` in their command line."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if any(name in part for part in child.cmdline())]


def wait_for(condition: object, seconds: float, what: str) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not after {seconds} s"
        time.sleep(0.2)
