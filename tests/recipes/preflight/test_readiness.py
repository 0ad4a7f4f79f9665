"""Each finding of the pre-flight names the node and the way out; the nodes are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_vrgd_recipes.preflight.node import Node
from ds_vrgd_recipes.preflight.readiness import GB, MIB, Cluster, faults_of, rows_of

GPU = ("NVIDIA H100", 80 * GB)
ONE = Node(
    host="node1",
    versions={"torch": "2.13.0", "driver": "580.1"},
    gpus=2,
    gpu=GPU,
    shm_size=2048 * MIB,
    shm_free=2000 * MIB,
    output_free=100 * GB,
)
#: Three nodes of two GPUs each.
NODES = tuple(
    replace(ONE, host=f"node{number}", rank=2 * (number - 1) + local, local_rank=local)
    for number in (1, 2, 3)
    for local in (0, 1)
)
WELL = Cluster(NODES, clocks={"node2": (0.5, 0.001), "node3": (-0.9, 0.001)}, reduced=("nccl", 0.4, 2e-5))


def with_node(number: int, **changes: object) -> Cluster:
    """Return the cluster with all ranks of one node changed."""
    host = f"node{number}"
    return replace(WELL, nodes=[replace(one, **changes) if one.host == host else one for one in NODES])  # type: ignore[arg-type]


def faults(cluster: Cluster) -> list[str]:
    return faults_of(cluster, "/shared/run", 50 * GB)


def test_nodes_that_are_well() -> None:
    assert faults(WELL) == []
    rows = dict(rows_of(WELL, "/shared/run"))
    assert rows["ranks"] == "6 on 3 nodes"
    assert rows["torch"] == "2.13.0"
    assert rows["node3"] == (
        "rank 4, 5; 2 GPUs, NVIDIA H100 with 80.0 GB; /dev/shm 2000 of 2048 MiB free; 100.0 GB free at /shared/run; "
        "clock -0.9000 s (± 0.0010)"
    )
    assert rows["all-reduce"] == "nccl, the first 400 ms, later 20 µs"


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (
            with_node(2, versions={"torch": "2.12.0", "driver": "580.1"}),
            "node2: torch 2.12.0, the others 2.13.0: start the same image or environment on every node",
        ),
        (
            with_node(1, versions={"torch": "2.13.0", "driver": "570.9"}),
            "node1: driver 570.9, the others 580.1: install the same driver",
        ),
        (with_node(3, versions={"torch": "2.13.0"}), "node3: driver none, the others 580.1: "),
        (
            with_node(3, gpu=("NVIDIA H100", 40 * GB)),
            "node3: NVIDIA H100 with 40.0 GB, the others NVIDIA H100 with 80.0 GB: ",
        ),
        (with_node(2, gpu=None), "node2: no GPU, the others NVIDIA H100 with 80.0 GB: "),
        (with_node(2, gpus=4), "node2: 4 GPUs for 2 ranks: start a rank for each GPU, or hide the others"),
        (with_node(2, shm_free=63 * MIB, shm_size=64 * MIB), "node2: /dev/shm has 63 MiB free of 64, and needs 1024: "),
        (with_node(2, output_free=20 * GB), "node2: 20.0 GB free at /shared/run, and --free asks for 50.0: "),
        (with_node(2, unwritable="/shared may not be written to"), "node2: /shared may not be written to: mount "),
        (
            replace(WELL, unshared=["node2", "node3"]),
            "node2, node3: a file that rank 0 wrote into /shared/run cannot be seen there: ",
        ),
        (
            replace(WELL, clocks={"node2": (-1.2, 0.1)}),
            "node2: its clock is 1.2 s behind that of node1: synchronise it (chronyc makestep)",
        ),
        (with_node(2, locks=("/cache/lock is 9 minutes old: remove it",)), "node2: /cache/lock is 9 minutes old"),
        (
            with_node(2, segments=("/dev/shm/nccl-a", "/dev/shm/nccl-b")),
            "node2: no process seen here uses the shared memory /dev/shm/nccl-a, /dev/shm/nccl-b: ",
        ),
        (replace(WELL, failed={"node3": "unhandled system error"}), "node3: the all-reduce failed: unhandled system"),
        (replace(WELL, wrong_sum=20.0), "node1: an all-reduce gave 20.0 in place of 21.0: do not train"),  # 1 + ... + 6
    ],
)
def test_finding_names_the_node_and_the_way_out(cluster: Cluster, expected: str) -> None:
    (fault,) = faults(cluster)
    assert fault.startswith(expected)


def test_nodes_with_other_numbers_of_ranks() -> None:
    """The fault names the numbers of ranks, not a hidden GPU."""
    without = replace(WELL, nodes=[replace(one, gpus=None, gpu=None) for one in NODES[:-1]])
    (fault,) = faults(without)
    assert fault == "node3: ranks: 1, on other nodes 2: start as many on every node"


def test_ranks_that_would_share_a_gpu() -> None:
    (fault,) = faults(with_node(2, local_rank=0))
    assert fault.startswith("node2: several ranks have LOCAL_RANK 0 and would share a GPU")


def test_clock_that_cannot_be_told_well_enough() -> None:
    """1.2 s ahead, give or take 0.3 s, may be 0.9 s."""
    assert faults(replace(WELL, clocks={"node2": (1.2, 0.3)})) == []


def test_shared_memory_that_one_rank_saw_in_use_is_in_use() -> None:
    """The other may have looked just before it was mapped."""
    first = replace(NODES[2], segments=("/dev/shm/nccl-a",))
    assert faults(replace(WELL, nodes=[*NODES[:2], first, *NODES[3:]])) == []


def test_cpu_ranks_need_what_a_container_has() -> None:
    cpu = replace(ONE, gpus=None, gpu=None, shm_size=64 * MIB, shm_free=64 * MIB)  # Docker's default
    assert faults(Cluster([cpu])) == []
    (fault,) = faults(Cluster([replace(cpu, shm_free=0)]))
    assert "needs 64" in fault


def test_of_two_nodes_the_other_one_is_the_odd_one() -> None:
    nodes = [NODES[0], replace(NODES[2], versions={"torch": "2.12.0", "driver": "580.1"})]
    (fault,) = faults(replace(WELL, nodes=[replace(one, gpus=1) for one in nodes], clocks={}, reduced=("nccl", 1, 1)))
    assert fault.startswith("node2: torch 2.12.0, the others 2.13.0")
