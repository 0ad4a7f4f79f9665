"""kill -9 of one rank at the worst places; what is started again ends bitwise where the run ends that was left alone.

``deepspeed`` is started for real in the tests marked slow; the others start the ranks as it does, and sooner.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from ds_vrgd_recipes.run.log import read_log
from tests.recipes.bert.cases import run_settings
from tests.recipes.bert.launching import FAULTS, ROOT, Whole, different, environment, free_port, launch

pytestmark = pytest.mark.slow

CONFIG = ROOT / "configs" / "ds_vrgd.json"
LAST = "checkpoints/step-000006"


@dataclass(frozen=True)
class Reference:
    """The run that nothing happens to."""

    arguments: list[str]  # of the runs to compare with it, all but the output folder's name
    output: Path
    last_line: str


@pytest.fixture(scope="module")
def reference(whole: Whole, corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    run_file = tmp_path_factory.mktemp("kills") / "run.yaml"
    # A process builds the batches, so that a signal to all processes meets it, too.
    run_file.write_text(yaml.safe_dump(run_settings(corpus_folder, loader_workers=1)), encoding="utf-8")
    arguments = ["--config", str(CONFIG), "--run", str(run_file), "--output"]
    return Reference(arguments, whole.output, whole.launch.stdout.splitlines()[-1])


def assert_the_same_end(reference: Reference, output: Path, last_line: str) -> None:
    assert last_line == reference.last_line
    assert different(output / LAST, reference.output / LAST) == []
    losses = [[record["loss"] for record in read_log(each) if "loss" in record] for each in (output, reference.output)]
    assert losses[0] == losses[1]


def test_killed_in_preparation_and_in_a_checkpoint(reference: Reference, tmp_path: Path) -> None:
    output = tmp_path / "killed"
    command = [*reference.arguments, str(output)]
    in_preparation = launch(2, *command, fault="0 kill_in_preparation 20")
    assert in_preparation.statuses[0] == -signal.SIGKILL
    assert in_preparation.statuses[1] != 0  # it did not wait for a dead rank
    assert sorted(path.name for path in output.iterdir()) == [".lock", "data.partial"]
    # The same command again. Rank 1 writes one file a checkpoint: the second one is that after update 4.
    in_checkpoint = launch(2, *command, fault="1 kill_in_checkpoint 2")
    assert in_checkpoint.statuses[1] == -signal.SIGKILL, in_checkpoint.stderr
    assert in_checkpoint.statuses[0] != 0
    left = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert left == ["step-000003", "step-000004.partial"]
    assert (output / "checkpoints" / "latest").read_text(encoding="utf-8") == "step-000003"
    resumed = launch(2, *command, "--resume", str(output))
    assert resumed.status == 0, resumed.stderr
    assert_the_same_end(reference, output, resumed.stdout.splitlines()[-1])
    assert not list(output.rglob("*.partial"))


@dataclass(frozen=True)
class Command:
    """How the ``deepspeed`` command ended, after how many seconds, and what it and the ranks said."""

    status: int
    seconds: float
    said: str


def deepspeed_command(fault: str, arguments: list[str], log: Path) -> Command:
    """Run the ``deepspeed`` command with two ranks, until it and all that it has started are gone."""
    command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "--log_level", "warning"]
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, str(FAULTS), *arguments],
            env=environment(2, fault),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    status = process.wait(timeout=180)
    try:
        while session := [each for each in psutil.process_iter() if in_session(each, process.pid)]:
            assert time.monotonic() < started + 180, session
            time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return Command(status, time.monotonic() - started, log.read_text(encoding="utf-8"))


def in_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_killed_in_an_update_under_the_launcher(reference: Reference, tmp_path: Path) -> None:
    """The survivor waits for gradients that will never come, and ends with its launcher, well before any timeout."""
    output = tmp_path / "killed"
    killed = deepspeed_command("1 kill_in_update 5", [*reference.arguments, str(output)], tmp_path / "log")
    assert killed.status not in (0, -signal.SIGKILL)
    assert (output / "checkpoints" / "latest").read_text(encoding="utf-8") == "step-000004"
    resumed = launch(2, *reference.arguments, str(output), "--resume", str(output))
    assert resumed.status == 0, resumed.stderr
    assert_the_same_end(reference, output, resumed.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("to", "status"),
    [
        ("1 sigterm_in_update", 0),
        ("0 sigterm_to_launcher_in_update", 1),
        ("1 sigterm_to_all_in_update", -signal.SIGTERM),
    ],
)
def test_sigterm_under_the_launcher(reference: Reference, tmp_path: Path, to: str, status: int) -> None:
    """All ranks save and say so. Where the launcher had the signal, too, its own status is not theirs."""
    output = tmp_path / "stopped"
    stopped = deepspeed_command(f"{to} 2", [*reference.arguments, str(output)], tmp_path / "log")
    assert (
        f"SIGTERM: saved after update 2 and stopped; resume with the same command and --resume {output}" in stopped.said
    )
    assert "Traceback" not in stopped.said
    assert stopped.status == status
    resumed = launch(2, *reference.arguments, str(output), "--resume", str(output))
    assert resumed.status == 0, resumed.stderr
    assert_the_same_end(reference, output, resumed.stdout.splitlines()[-1])


def test_sigterm_to_the_command_alone_reaches_no_rank(reference: Reference, tmp_path: Path) -> None:
    """Not what one wants, but DeepSpeed's: the command passes the signal on only where it starts several machines."""
    output = tmp_path / "orphaned"
    orphaned = deepspeed_command(
        "0 sigterm_to_command_in_update 2", [*reference.arguments, str(output)], tmp_path / "log"
    )
    assert orphaned.status == -signal.SIGTERM
    assert reference.last_line in orphaned.said  # to the end
