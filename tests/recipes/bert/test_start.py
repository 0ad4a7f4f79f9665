"""The run under each launcher's environment, and in the images' entry: stopped by SIGTERM, it goes on by itself."""

from __future__ import annotations

import os
import subprocess

import pytest

from ds_vrgd_recipes.run.log import read_log
from tests.recipes.bert.launching import FAULTS, ROOT, Whole, different, environment, free_port, launch_in

START = ROOT / "docker" / "start.sh"
LAST = "checkpoints/step-000006"
NEVER = "9 kill_in_update 1"  # there is no rank 9
#: Two nodes of one task; on this machine both are localhost. Names and meanings: srun(1).
SRUN = [
    {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
    }
    for rank in (0, 1)
]
#: Two ranks of one node: mpirun(1).
MPIRUN = [
    {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    for rank in (0, 1)
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_ranks_without_a_launcher_of_torchs(
    whole: Whole, ranks: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses as the run's whose ranks are told by RANK, up to the order of sums between two nodes."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    port = str(free_port())
    output = whole.output.parent / f"started-{port}"
    started = launch_in([{**own, "MASTER_PORT": port} for own in ranks], *whole.arguments, str(output))
    assert started.status == 0, started.stderr
    losses = [[record["loss"] for record in read_log(each) if "loss" in record] for each in (output, whole.output)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 6


def entry(whole: Whole, fault: str) -> subprocess.CompletedProcess[str]:
    """The images' entry command, as a container of two ranks runs it."""
    variables = {"PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    output = whole.output.parent / "entry"
    return subprocess.run(
        [str(START), str(FAULTS), *whole.arguments, str(output), "--resume", "auto"],
        env={**environment(2, fault), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_entry_of_the_images_stops_by_sigterm_and_goes_on(whole: Whole) -> None:
    """To the bit the run that was never stopped; the signal reaches only the first process, as docker stop sends it."""
    output = whole.output.parent / "entry"
    stopped = entry(whole, "0 sigterm_to_command_in_update 2")
    assert stopped.returncode == os.EX_TEMPFAIL, stopped.stderr
    assert f"SIGTERM: saved after update 2 and stopped; resume with the same command and --resume {output}" in (
        stopped.stdout
    )
    assert "| verdict      | ready |" in stopped.stdout  # the nodes were checked first
    again = entry(whole, NEVER)
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[-1] == whole.launch.stdout.splitlines()[-1]
    assert different(output / LAST, whole.output / LAST) == []
    finished = entry(whole, NEVER)
    assert finished.returncode == 0, finished.stderr
    assert "already holds this run, finished" in finished.stdout


@pytest.mark.slow
def test_entry_of_the_images_tells_a_failure(whole: Whole) -> None:
    failed = subprocess.run(
        [str(START), str(FAULTS), *whole.arguments[:2], "--run", "absent.yaml", "--output", "/tmp/absent"],
        env={**environment(1, NEVER), "PET_MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert failed.returncode not in (0, os.EX_TEMPFAIL)
    assert "absent.yaml" in failed.stderr


def test_entry_of_the_images_runs_anything_else_as_it_is() -> None:
    done = subprocess.run([str(START), "sh", "-c", "echo $0 $1; exit 7", "a", "b"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "a b\n")


def test_entry_of_the_images_needs_the_output() -> None:
    done = subprocess.run([str(START), "run.py", "--resume=auto"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--output FOLDER is missing" in done.stderr
