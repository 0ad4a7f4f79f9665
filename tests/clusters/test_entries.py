"""The shell entries that need a cluster, with stand-ins that record how its commands were called."""

from __future__ import annotations

import os
import runpy
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPI, SLURM = ROOT / "docker" / "mpi.sh", ROOT / "scripts" / "slurm_container.sbatch"
HEALTH = ROOT / "docker" / "health.sh"


@dataclass
class Cluster:
    """Commands in a folder, and the calls of them."""

    folder: Path

    def command(self, name: str, script: str = "") -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.folder / "calls"}\n{script}\n', encoding="utf-8")
        path.chmod(0o755)

    def run(self, *command: str | Path, **variables: str) -> int:
        (self.folder / "calls").unlink(missing_ok=True)
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", **variables}
        return subprocess.run(list(map(str, command)), env=environment, capture_output=True, check=False).returncode

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Every command succeeds."""
    found = Cluster(tmp_path)
    for name in ("mpirun", "srun", "scontrol", "ds-vrgd", "python"):
        found.command(name)
    found.command("squeue", "echo RUNNING")
    (tmp_path / "hostfile").write_text("job-worker-0.job slots=8\njob-worker-1.job slots=8\n", encoding="utf-8")
    return found


def test_mpi_checks_the_nodes_and_trains(cluster: Cluster) -> None:
    where = {"OMPI_MCA_orte_default_hostfile": str(cluster.folder / "hostfile")}
    command = (MPI, "train.py", "--run=r.yaml", f"--output={cluster.folder}")
    assert cluster.run(*command, **where) == os.EX_TEMPFAIL  # no result.json: it was stopped
    doctor, training = cluster.calls
    for call in (doctor, training):
        assert "-x MASTER_ADDR=job-worker-0.job -x MASTER_PORT=29500" in call
    assert f" {cluster.folder}/ds-vrgd doctor --cluster --output {cluster.folder} --free 1" in doctor
    assert training.endswith(f" {cluster.folder}/python train.py --run=r.yaml --output={cluster.folder}")
    (cluster.folder / "result.json").touch()
    assert cluster.run(*command, **where) == 0
    cluster.command("mpirun", "exit 3")
    assert cluster.run(*command, **where) == 3
    assert len(cluster.calls) == 1  # nodes that are not ready do not train
    assert cluster.run(MPI, "train.py", **where) == 2  # no output


def test_health_is_that_of_the_run(tmp_path: Path) -> None:
    """A run that logs, or has just started, is healthy; one that has been silent for an hour is not."""
    output = tmp_path / "run"
    output.mkdir()
    note, log = tmp_path / f"ds_vrgd-output-{os.getuid()}", output / "log.jsonl"

    def unhealthy(**variables: str) -> str:
        environment = {"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path), **variables}
        done = subprocess.run([HEALTH], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == bool(done.stderr)
        return done.stderr

    assert unhealthy() == ""  # no run
    note.write_text(f"{output}\n", encoding="utf-8")
    log.touch()
    past = time.time() - 2 * 3600
    os.utime(log, (past, past))
    assert unhealthy() == ""  # started again just now
    os.utime(note, (past, past))
    assert f"no update was logged in {log} for 60 minutes" in unhealthy()
    assert unhealthy(DS_VRGD_STALL_MINUTES="180") == ""
    log.write_text("{}\n", encoding="utf-8")
    assert unhealthy() == ""
    os.utime(log, (past, past))
    (output / "result.json").touch()
    assert unhealthy() == ""


def test_slurm_queues_again_until_the_run_is_finished(cluster: Cluster) -> None:
    command = ("bash", SLURM, "image.sif", "/shared", "train.py", "--run=r.yaml", f"--output={cluster.folder}")
    assert cluster.run(*command, SLURM_JOB_ID="7") == 0
    doctor, training, *others = cluster.calls
    apptainer = "srun --kill-on-bad-exit=1 apptainer exec --nv --bind /shared --pwd /opt/ds_vrgd image.sif"
    assert doctor == f"{apptainer} ds-vrgd doctor --cluster --output {cluster.folder} --free 50"
    assert training == f"{apptainer} python train.py --run=r.yaml --output={cluster.folder} --resume=auto"
    assert others == ["squeue --noheader --jobs 7 --format %T", "scontrol requeue 7"]
    cluster.command("squeue", "echo COMPLETING")  # cancelled, or queued again by SLURM itself
    cluster.run(*command, SLURM_JOB_ID="7")
    assert not [call for call in cluster.calls if call.startswith("scontrol")]
    (cluster.folder / "result.json").touch()
    assert cluster.run(*command, SLURM_JOB_ID="7") == 0
    assert len(cluster.calls) == 2


def test_slurm_queues_again_after_a_stop_before_the_first_update(cluster: Cluster) -> None:
    cluster.command("srun", "exit 143")  # 128 + SIGTERM, which the ranks do not catch yet
    command = ("bash", SLURM, "image.sif", "/shared", "train.py", f"--output={cluster.folder}")
    assert cluster.run(*command, SLURM_JOB_ID="7") == 143
    assert cluster.calls[-1] == "scontrol requeue 7"
    assert not [call for call in cluster.calls if "train.py" in call]  # the check was stopped


def test_slurm_leaves_a_failed_job_where_it_is(cluster: Cluster) -> None:
    cluster.command("srun", "exit 1")
    assert cluster.run("bash", SLURM, "registry#image:tag", "/shared", "train.py", "--output=/shared/x") == 1
    (call,) = cluster.calls
    assert "--container-image=registry#image:tag --container-mounts=/shared:/shared --container-workdir=/opt/ds" in call
    assert cluster.run("bash", SLURM, "image.sif", "/shared", "train.py", "--run=r.yaml") == 2  # no output


def test_what_the_base_has_stays() -> None:
    """A base image keeps its own torch; its other packages are those that the tests ran with."""
    constraints = runpy.run_path(str(ROOT / "docker" / "constraints.py"))["constraints"]
    lines = ["# extra: bert", "torch==1.0  # as tested", "", 'no-such-package==2.0; python_version >= "3.11"']
    torch, other, *with_torch = constraints(lines)
    assert torch == f"torch=={metadata.version('torch')}"
    assert other == 'no-such-package==2.0; python_version >= "3.11"'
    assert {line.partition("==")[0] for line in with_torch} <= {"torchvision", "torchaudio"}
