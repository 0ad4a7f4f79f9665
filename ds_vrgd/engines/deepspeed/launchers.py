"""Set the environment that torch.distributed reads where a launcher names it otherwise.

torchrun and DeepSpeed's launchers set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Under ``srun`` and
``mpirun`` DeepSpeed asks mpi4py, which few environments have; its answers are in the environment as well.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from deepspeed.accelerator import get_accelerator


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
    local_rank, accelerator = int(os.environ.get("LOCAL_RANK", "0")), get_accelerator()
    if accelerator.device_name() != "cpu" and local_rank >= accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} sees {accelerator.device_count()} accelerators, and each rank uses the one with "
            "its own number: let every rank see all of the node (srun without --gpus-per-task and --gpu-bind), or "
            "start as many ranks as there are accelerators"
        )
    return True


def from_slurm(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return what torch reads, for a task of a SLURM job step with several tasks; None outside of one.

    The shell of a batch script has SLURM_PROCID and SLURM_NTASKS, too; only ``srun`` sets SLURM_STEP_NUM_TASKS.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "SLURM_PROCID" not in environ:
        return None
    # SLURM writes 2, 2, 2, 1 tasks on four nodes as 2(x3),1.
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    on_node = [count for count, times in counts for _ in range(int(times or 1))]
    address = environ.get("MASTER_ADDR", "127.0.0.1" if len(on_node) == 1 else "")
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": on_node[int(environ.get("SLURM_NODEID", "0"))],
        "MASTER_ADDR": address or first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(20000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000),  # jobs may share a node
    }


def from_open_mpi(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return what torch reads, for a process of Open MPI's ``mpirun``; None outside of one.

    Raises:
        ValueError: the ranks are on several nodes, and MASTER_ADDR is not set.
    """
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    theirs = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    found = {name: environ[f"OMPI_COMM_WORLD_{their}"] for their, name in theirs.items()}
    if found["WORLD_SIZE"] != found["LOCAL_WORLD_SIZE"] and "MASTER_ADDR" not in environ:
        raise ValueError(
            f"mpirun started {found['WORLD_SIZE']} ranks, {found['LOCAL_WORLD_SIZE']} of them on this node, and "
            "MASTER_ADDR is not set: mpirun does not report where rank 0 is. Give it the first host of the hostfile: "
            "mpirun -x MASTER_ADDR=HOST ..."
        )
    return found | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # torch's own default port


def first_host(nodes: str) -> str:
    """Return the first host of a list as SLURM abbreviates it: rack1node03-ib of ``rack[1-2]node[03,5]-ib,login1``.

    Raises:
        ValueError: a bracket is not closed, or holds no number.
    """
    first = re.sub(r"\[(\w+)[^\[\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes.strip())[0])
    if not first or set(first) & set("[]"):
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodes!r} is no list of hosts, so rank 0's address is not known: set MASTER_ADDR to "
            "its first host (scontrol show hostnames)"
        )
    return first
