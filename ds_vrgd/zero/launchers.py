"""The environment that torch.distributed reads, from launchers that name it otherwise.

torchrun and DeepSpeed's launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under ``srun`` and
``mpirun`` DeepSpeed asks mpi4py, which few environments have; what it would say stands in the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from deepspeed.accelerator import get_accelerator

_PORT = 29500  # torch's own default


def adopt_launcher() -> bool:
    """Set torch.distributed's variables for a rank that ``srun`` or ``mpirun`` has started.

    Returns:
        Whether this process is a rank of a launcher, torchrun's and DeepSpeed's included.

    Raises:
        ValueError: rank 0's address is not known, or the rank has no accelerator of its own.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        found = from_slurm(os.environ) or from_open_mpi(os.environ)
        if found is None:
            return False
        os.environ.update({name: value for name, value in found.items() if name not in os.environ})
    _require_accelerator(int(os.environ.get("LOCAL_RANK", "0")))
    return True


def from_slurm(environ: Mapping[str, str]) -> dict[str, str] | None:
    """What a task of a job step with several tasks should have set; None outside of one.

    The shell of a batch script has SLURM_PROCID and SLURM_NTASKS, too; SLURM_STEP_NUM_TASKS is ``srun``'s alone.
    """
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks == 1 or "SLURM_PROCID" not in environ:
        return None
    node = int(environ.get("SLURM_NODEID", "0"))
    on_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(on_node[node]),
        "MASTER_ADDR": "127.0.0.1" if len(on_node) == 1 else first_host(environ["SLURM_STEP_NODELIST"]),
        # Jobs that share a node must not meet at one port.
        "MASTER_PORT": str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000),
    }


def from_open_mpi(environ: Mapping[str, str]) -> dict[str, str] | None:
    """What a process of Open MPI's ``mpirun`` should have set; None outside of one.

    Raises:
        ValueError: the ranks are on several nodes, and MASTER_ADDR is not set.
    """
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    world, on_node = environ["OMPI_COMM_WORLD_SIZE"], environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
    if world != on_node and "MASTER_ADDR" not in environ:
        raise ValueError(
            f"mpirun started {world} ranks, {on_node} of them on this node, and MASTER_ADDR is not set: mpirun tells "
            "no rank where rank 0 is. Give it the first host of the hostfile: mpirun -x MASTER_ADDR=HOST ..."
        )
    return {
        "RANK": environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": world,
        "LOCAL_RANK": environ["OMPI_COMM_WORLD_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": on_node,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_PORT),
    }


def first_host(nodes: str) -> str:
    """Of a list as SLURM abbreviates it: ``gpu[07-09,12],login1`` begins with gpu07."""
    first = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    assert first is not None  # it matches the empty string
    return "".join(part or "" for part in first.groups())


def _tasks_per_node(counts: str) -> list[int]:
    """One number a node: ``2(x3),1`` is SLURM's for 2, 2, 2, 1."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        found += [int(count)] * int(times or 1)
    return found


def _require_accelerator(local_rank: int) -> None:
    """Check that this rank's is visible.

    Raises:
        ValueError: it is not.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu" and local_rank >= accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} sees {accelerator.device_count()} accelerators, and each rank takes the one with "
            "its own number: let every rank see all of the node (srun without --gpus-per-task and --gpu-bind), or "
            "start as many ranks as there are accelerators"
        )
