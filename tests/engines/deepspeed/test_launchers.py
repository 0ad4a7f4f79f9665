"""The variables of torch.distributed under srun and mpirun: what the launchers document, and what torch needs."""

from __future__ import annotations

import os

import pytest

from ds_vrgd.engines.deepspeed import launchers
from ds_vrgd.engines.deepspeed.launchers import adopt_launcher, first_host, from_open_mpi, from_slurm

#: Task 5 of 7, on the third of four nodes (srun(1), "OUTPUT ENVIRONMENT VARIABLES").
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
#: mpirun(1), "ENVIRONMENT VARIABLES".
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
READ_BY_TORCH = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that no launcher has touched."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in READ_BY_TORCH})
    return monkeypatch


def test_srun() -> None:
    assert from_slurm(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "34567",  # 20000 + 1234567 % 20000
    }
    last = {**SLURM, "SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"}
    assert (from_slurm(last) or {})["LOCAL_WORLD_SIZE"] == "1"


def test_tasks_on_one_node_meet_there() -> None:
    one = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "gpu07", "SLURM_NODEID": "0"}
    assert (from_slurm(one) or {})["MASTER_ADDR"] == "127.0.0.1"


def test_shell_of_a_batch_script_is_no_rank() -> None:
    shell = {name: value for name, value in SLURM.items() if "STEP" not in name}
    assert from_slurm({**shell, "SLURM_NTASKS": "7"}) is None
    assert from_slurm({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None  # an interactive shell: srun --pty bash


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack1-gpu[1,3]", "rack1-gpu1"),
        ("gpu[1-2].local", "gpu1.local"),
        ("rack[1-2]node[1-3]", "rack1node1"),
        ("rack[01-12]node[003-010,12],login1", "rack01node003"),
        ("a[1,3]b[2]c[4-5]-ib0,d", "a1b2c4-ib0"),
        ("[1-3]", "1"),
        ("login1,gpu[1-2]", "login1"),
        ("gpu[8],gpu[1-2]", "gpu8"),
        ("gpu-[a1,b2]", "gpu-a1"),
        (" gpu1 ", "gpu1"),
    ],
)
def test_first_host_of_an_abbreviated_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first  # as `scontrol show hostnames` writes it out


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu[1-3", "gpu[]", "gpu1]", ",gpu1", "gpu[[1]]"])
def test_what_is_no_list_of_hosts_is_an_error(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"is no list of hosts.*set MASTER_ADDR"):
        first_host(nodes)


def test_an_address_that_is_given_needs_no_list() -> None:
    given = {**SLURM, "SLURM_STEP_NODELIST": "gpu[", "MASTER_ADDR": "gpu07-ib0"}
    assert (from_slurm(given) or {})["MASTER_ADDR"] == "gpu07-ib0"


def test_mpirun() -> None:
    with pytest.raises(ValueError, match=r"4 ranks, 2 of them on this node.*mpirun -x MASTER_ADDR"):
        from_open_mpi(OPEN_MPI)
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert (from_open_mpi(alone) or {})["MASTER_ADDR"] == "127.0.0.1"
    assert from_open_mpi({}) is None


def test_what_is_set_stays(bare: pytest.MonkeyPatch) -> None:
    os.environ.update(OPEN_MPI, MASTER_ADDR="job-worker-0", MASTER_PORT="1234")
    assert adopt_launcher()
    assert {name: os.environ[name] for name in READ_BY_TORCH} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "job-worker-0",
        "MASTER_PORT": "1234",
    }


def test_torchrun_under_srun_is_torchrun(bare: pytest.MonkeyPatch) -> None:
    os.environ.update(SLURM, RANK="0", WORLD_SIZE="2")
    assert adopt_launcher()
    assert os.environ["RANK"] == "0"
    assert "LOCAL_RANK" not in os.environ


def test_no_launcher(bare: pytest.MonkeyPatch) -> None:
    assert not adopt_launcher()


def test_rank_without_an_accelerator_is_an_error(bare: pytest.MonkeyPatch) -> None:
    """--gpus-per-task hides all GPUs but one from each task."""
    bare.setattr(launchers.get_accelerator(), "device_name", lambda: "cuda")
    bare.setattr(launchers.get_accelerator(), "device_count", lambda: 1)
    os.environ.update(SLURM)
    with pytest.raises(ValueError, match=r"local rank 1 sees 1 accelerators.*--gpus-per-task"):
        adopt_launcher()
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")  # torchrun --nproc-per-node 2 with one GPU
    with pytest.raises(ValueError, match="local rank 1 sees 1 accelerators"):
        adopt_launcher()
    os.environ["LOCAL_RANK"] = "0"
    assert adopt_launcher()
