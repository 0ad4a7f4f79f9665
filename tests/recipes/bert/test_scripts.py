"""The launchers in scripts/: what they start, how they stop, and that the same command goes on to the same end.

SLURM itself is not there: stand-ins for srun, squeue and scontrol do what their manual pages say.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.recipes.bert.launching import FAULTS, ROOT, Whole, different, environment

LOCAL = ROOT / "scripts" / "launch_local.sh"
SLURM = ROOT / "scripts" / "slurm_pretrain.sbatch"
LAST = "checkpoints/step-000006"

#: Two tasks on one node (srun(1), "OUTPUT ENVIRONMENT VARIABLES"); the script is exchanged for one with a fault.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *arguments: None)
option, python, script, *arguments = sys.argv[1:]
assert (option, python, script) == ("--kill-on-bad-exit=1", "python", "scripts/pretrain_bert.py"), sys.argv
step = {{
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "gpu07",
    "SLURM_NODEID": "0",
}}
script = {str(FAULTS)!r} if os.environ["FAULT"] else script
tasks = [
    subprocess.Popen(
        [python, script, *arguments], env={{**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}}
    )
    for rank in "01"
]
sys.exit(max(task.wait() for task in tasks))
"""


@dataclass(frozen=True)
class Job:
    """How a script ended: its status, what it said, and what it asked of scontrol."""

    status: int
    said: str
    asked: str


class Machine:
    """A PATH in which commands have stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir()

    def command(self, name: str, text: str) -> None:
        path = self.commands / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)

    def start(self, script: Path, *arguments: str, fault: str = "", **variables: str) -> subprocess.Popen[str]:
        """``script`` as the leader of a session, in which all of it stays."""
        own = environment(2, fault)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            own.pop(name, None)
        path = f"{self.commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", str(script), *arguments],
            cwd=ROOT,
            env={**own, "PATH": path, "FOLDER": str(self.folder), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # A shell cannot trap what was ignored when it began, as ^C is in a suite that runs in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def slurm(self, *arguments: str, state: str = "RUNNING", fault: str = "", srun: str = SRUN) -> Job:
        """A job of two tasks under SLURM. The number of the job gives the port."""
        self.command("srun", srun)
        self.command("squeue", f'test "$*" = "--noheader --jobs {os.getpid()} --format %T" && echo {state}')
        self.command("scontrol", 'echo "$@" >> "$FOLDER/asked"')
        asked = self.folder / "asked"
        asked.unlink(missing_ok=True)
        process = self.start(SLURM, *arguments, fault=fault, SLURM_JOB_ID=str(os.getpid()))
        said, _ = process.communicate(timeout=240)
        return Job(process.returncode, said, asked.read_text(encoding="utf-8") if asked.exists() else "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_slurm_stops_by_sigterm_queues_itself_again_and_goes_on(whole: Whole, machine: Machine) -> None:
    """To the bit the run that was never stopped. SIGTERM comes to all at once, the batch script's shell included."""
    output = machine.folder / "run"
    _, config, _, run_file, _ = whole.arguments
    command = [run_file, str(output), config]
    stopped = machine.slurm(*command, fault="1 sigterm_to_all_in_update 2")
    assert "SIGTERM: saved after update 2 and stopped" in stopped.said
    assert "Traceback" not in stopped.said
    assert (stopped.status, stopped.asked) == (0, f"requeue {os.getpid()}\n")
    again = machine.slurm(*command)
    assert (again.status, again.asked) == (0, ""), again.said
    assert again.said.splitlines()[-1] == whole.launch.stdout.splitlines()[-1]
    assert different(output / LAST, whole.output / LAST) == []
    finished = machine.slurm(*command)
    assert (finished.status, finished.asked) == (0, "")
    assert "already holds this run, finished" in finished.said


@pytest.mark.parametrize(
    ("status", "state", "asked"),
    [
        (0, "RUNNING", "requeue"),
        (0, "COMPLETING", ""),  # cancelled
        (0, "PENDING", ""),  # pre-empted, and queued again by SLURM
        (143, "RUNNING", "requeue"),  # stopped before the first update
        (143, "COMPLETING", ""),
        (1, "RUNNING", ""),  # failed, and would again
        (2, "RUNNING", ""),
    ],
)
def test_slurm_queues_again_what_has_saved_and_is_not_finished(
    machine: Machine, status: int, state: str, asked: str
) -> None:
    job = machine.slurm("run.yaml", "out", state=state, srun=f"exit {status}")
    assert job.status == status
    assert job.asked.split()[:1] == asked.split()


def test_slurm_with_a_configuration_of_ones_own(machine: Machine) -> None:
    job = machine.slurm("run.yaml", "out", "ds.json", srun='echo "$@"', state="COMPLETING")
    assert job.said.split() == [
        *("--kill-on-bad-exit=1", "python", "scripts/pretrain_bert.py", "--deepspeed_config", "ds.json"),
        *("--run", "run.yaml", "--output", "out", "--resume", "auto"),
    ]


@pytest.mark.slow
def test_local_stops_by_sigterm_and_goes_on(whole: Whole, machine: Machine) -> None:
    """The signal reaches the script alone, and its status is 0; the same command ends as the run that never stopped."""
    output = machine.folder / "run"
    _, config, _, run_file, _ = whole.arguments
    # The real one, with the script exchanged for one with a fault.
    machine.command(
        "deepspeed",
        f"""script={LOCAL.parent}/pretrain_bert.py
        for argument; do shift
          if [ "$argument" = "$script" ] && [ "$FAULT" ]; then argument={FAULTS}; fi
          set -- "$@" "$argument"
        done
        exec {Path(sys.executable).parent}/deepspeed "$@\"""",
    )
    command = (run_file, str(output), config)
    said = []
    for fault in ("0 sigterm_to_session_in_update 2", ""):
        process = machine.start(LOCAL, *command, fault=fault, RANKS="2")
        said.append(process.communicate(timeout=240)[0])
        assert process.returncode == 0, said[-1]
    assert "SIGTERM: saved after update 2 and stopped" in said[0]
    assert "Traceback" not in said[0]
    assert whole.launch.stdout.splitlines()[-1] in said[1].splitlines()
    assert different(output / LAST, whole.output / LAST) == []


#: Starts a rank that saves when it gets SIGTERM, named on the command line as by DeepSpeed; or none.
LAUNCHER = """test "$WITHOUT_RANKS" && { touch "$FOLDER/ready"; sleep 60; exit 3; }
sh -c 'trap "echo saved; exit 0" TERM; touch "$FOLDER/ready"; while :; do sleep 0.05; done' rank --local_rank=0 &
wait $!
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_local_passes_a_signal_to_one_rank_and_waits(machine: Machine, number: signal.Signals) -> None:
    machine.command("deepspeed", LAUNCHER)
    process = machine.start(LOCAL, "run.yaml", "out")
    assert stopped_when_ready(machine, process, number) == (0, "saved\n")


def test_local_ends_at_once_where_there_is_no_rank_yet(machine: Machine) -> None:
    machine.command("deepspeed", LAUNCHER)
    process = machine.start(LOCAL, "run.yaml", "out", WITHOUT_RANKS="1")
    status, _ = stopped_when_ready(machine, process, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM


def stopped_when_ready(machine: Machine, process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    while not (machine.folder / "ready").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    return process.returncode, said


def test_local_tells_a_failure(machine: Machine) -> None:
    machine.command("deepspeed", "exit 7")
    process = machine.start(LOCAL, "run.yaml", "out")
    process.communicate(timeout=30)
    assert process.returncode == 7


@pytest.mark.parametrize("ranks", ["", "4"])
def test_local_takes_all_gpus_unless_told(machine: Machine, ranks: str) -> None:
    machine.command("deepspeed", 'echo "$LOCAL_SIZE" "$@"')
    process = machine.start(LOCAL, "run.yaml", "out", RANKS=ranks, LOCAL_SIZE="")
    said, _ = process.communicate(timeout=30)
    assert said.split() == [
        *([ranks] if ranks else []),
        *("--log_level", "warning", *(["--num_gpus", ranks] if ranks else [])),
        *(f"{ROOT}/scripts/pretrain_bert.py", "--deepspeed_config", f"{ROOT}/scripts/../configs/ds_vrgd.json"),
        *("--run", "run.yaml", "--output", "out", "--resume", "auto"),
    ]


@pytest.mark.parametrize("script", [LOCAL, SLURM])
@pytest.mark.parametrize("arguments", [(), ("run.yaml",), ("run.yaml", "out", "ds.json", "more")])
def test_usage(machine: Machine, script: Path, arguments: tuple[str, ...]) -> None:
    process = machine.start(script, *arguments)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said.startswith("usage: ")
