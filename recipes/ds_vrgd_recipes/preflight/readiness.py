"""The reasons why nodes cannot train together: pure functions from what the ranks found to sentences with a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from ds_vrgd.doctor.report import Row
from ds_vrgd_recipes.preflight.node import Node

MIB, GB = 2**20, 10**9
#: Docker gives a container 64 MiB of shared memory; NCCL and loader processes need more (NCCL user guide,
#: "Docker": --shm-size=1g). gloo needs none.
LEAST_SHM = {"gpu": 1024 * MIB, "cpu": 64 * MIB}
#: Seconds that two clocks may differ by, beyond the uncertainty of the measurement. Log lines of several nodes can then
#: be put in order, and files on a shared disk have the right age.
MOST_APART = 1.0


@dataclass(frozen=True)
class Cluster:
    """The findings of all ranks together.

    Attributes:
        nodes: the node of each rank.
        clocks: by host, the seconds that its clock is ahead of rank 0's, and their uncertainty.
        unshared: hosts on which a file that rank 0 wrote into the output cannot be seen.
        reduced: the collective library, its set-up and a later all-reduce in seconds; None for a process alone.
        wrong_sum: the sum that the all-reduce gave, if it was wrong.
        failed: by host, the error of the all-reduce.
    """

    nodes: Sequence[Node]
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    unshared: Sequence[str] = ()
    reduced: tuple[str, float, float] | None = None
    wrong_sum: float | None = None
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """Return whether this is a single process that no launcher has started."""
        return self.reduced is None

    @property
    def hosts(self) -> dict[str, list[Node]]:
        """The ranks of each host, in the order of the hosts' first ranks."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.host, []).append(node)
        return found


def faults_of(cluster: Cluster, output: str, least_free: float) -> list[str]:
    """Return every reason not to start, with the node's name and the way out.

    Args:
        cluster: what was found.
        output: folder that the run writes to.
        least_free: bytes that the run needs there.
    """
    return [
        *_odd_versions(cluster),
        *_odd_gpus(cluster),
        *_odd_ranks(cluster),
        *_shared_memory(cluster),
        *_disk(cluster, output, least_free),
        *_clocks(cluster),
        *_left_over(cluster),
        *_all_reduce(cluster),
    ]


def _odd_ones(cluster: Cluster, value_of: Callable[[Node], Hashable]) -> tuple[Hashable, dict[Hashable, list[str]]]:
    """Return the value of most ranks (rank 0's in a tie), and the hosts of every other value."""
    values = [value_of(node) for node in cluster.nodes]
    usual = Counter(values).most_common(1)[0][0]
    others: dict[Hashable, list[str]] = {}
    for node, value in zip(cluster.nodes, values, strict=True):
        if value != usual and node.host not in others.setdefault(value, []):
            others[value].append(node.host)
    return usual, others


def _odd_versions(cluster: Cluster) -> list[str]:
    found = []
    for name in {name: None for node in cluster.nodes for name in node.versions}:
        usual, others = _odd_ones(cluster, lambda node, name=name: node.versions.get(name, "none"))  # type: ignore[misc]
        way_out = "install the same driver" if name == "driver" else "start the same image or environment on every node"
        found += [
            f"{', '.join(hosts)}: {name} {value}, the others {usual}: {way_out}" for value, hosts in others.items()
        ]
    return found


def _odd_gpus(cluster: Cluster) -> list[str]:
    usual, others = _odd_ones(cluster, lambda node: node.gpu)
    found = [
        f"{', '.join(hosts)}: {_gpu(value)}, the others {_gpu(usual)}: every rank gets an equal share of the work, so "
        "leave the node out, or use only such nodes"
        for value, hosts in others.items()
    ]
    for host, ranks in cluster.hosts.items():
        gpus, own = ranks[0].gpus, len(ranks)
        if gpus is not None and gpus > own and not cluster.alone:
            found.append(f"{host}: {gpus} GPUs for {own} ranks: start a rank for each GPU, or hide the others")
    return found


def _gpu(value: Hashable) -> str:
    if not isinstance(value, tuple):
        return "no GPU"
    name, memory = value
    return f"{name} with {memory / GB:.1f} GB"


def _odd_ranks(cluster: Cluster) -> list[str]:
    found = []
    numbers = {host: len(ranks) for host, ranks in cluster.hosts.items()}
    usual = Counter(numbers.values()).most_common(1)[0][0]
    for host, number in numbers.items():
        if number != usual:
            found.append(f"{host}: ranks: {number}, on other nodes {usual}: start as many on every node")
    for host, ranks in cluster.hosts.items():
        twice = [local for local, times in Counter(node.local_rank for node in ranks).items() if times > 1]
        if twice:
            found.append(
                f"{host}: several ranks have LOCAL_RANK {twice[0]} and would share a GPU: were two jobs started "
                "here, or is the launcher's LOCAL_RANK overwritten?"
            )
    return found


def _shared_memory(cluster: Cluster) -> list[str]:
    found = []
    for host, ranks in cluster.hosts.items():
        node = ranks[0]
        least = LEAST_SHM["cpu" if node.gpus is None else "gpu"]
        if node.shm_free < least:
            found.append(
                f"{host}: /dev/shm has {node.shm_free // MIB} MiB free of {node.shm_size // MIB}, and needs "
                f"{least // MIB}: give the container --shm-size=1g (Docker), shm_size: 1gb (compose) or an emptyDir "
                "with medium: Memory at /dev/shm (Kubernetes), or remove what a dead job has left there"
            )
    return found


def _disk(cluster: Cluster, output: str, least_free: float) -> list[str]:
    found = []
    for host, ranks in cluster.hosts.items():
        node = ranks[0]
        if node.unwritable:
            found.append(
                f"{host}: {node.unwritable}: mount a folder that this user owns there, or give another --output"
            )
        elif node.output_free < least_free:
            found.append(
                f"{host}: {node.output_free / GB:.1f} GB free at {output}, and --free asks for {least_free / GB:.1f}: "
                "make room, or give another --output"
            )
    if cluster.unshared:
        found.append(
            f"{', '.join(cluster.unshared)}: a file that rank 0 wrote into {output} cannot be seen there: give an "
            "--output on a disk that all nodes share; checkpoints are written by all and completed by rank 0"
        )
    return found


def _clocks(cluster: Cluster) -> list[str]:
    return [
        f"{host}: its clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of "
        f"{cluster.nodes[0].host}: synchronise it (chronyc makestep)"
        for host, (offset, doubt) in cluster.clocks.items()
        if abs(offset) - doubt > MOST_APART
    ]


def _left_over(cluster: Cluster) -> list[str]:
    found = []
    for host, ranks in cluster.hosts.items():
        found += [f"{host}: {lock}" for lock in {lock: None for node in ranks for lock in node.locks}]
        # A segment that one rank saw abandoned and another did not was in use.
        segments = sorted(set.intersection(*(set(node.segments) for node in ranks)))
        if segments:
            found.append(
                f"{host}: no process seen here uses the shared memory {', '.join(segments)}: left by a job that was "
                "killed. If no other container of yours works on the node, remove it: rm " + " ".join(segments)
            )
    return found


def _all_reduce(cluster: Cluster) -> list[str]:
    found = [
        f"{host}: the all-reduce failed: {error}: set NCCL_DEBUG=INFO for where, and NCCL_SOCKET_IFNAME (or "
        "GLOO_SOCKET_IFNAME) to the interface that joins the nodes"
        for host, error in cluster.failed.items()
    ]
    if cluster.wrong_sum is not None:
        right = len(cluster.nodes) * (len(cluster.nodes) + 1) / 2
        found.append(
            f"{cluster.nodes[0].host}: an all-reduce gave {cluster.wrong_sum} in place of {right}: do not train on "
            "these nodes; try NCCL_P2P_DISABLE=1, then half of them, to find the one"
        )
    return found


def rows_of(cluster: Cluster, output: str) -> list[Row]:
    """Return the findings as rows of the table."""
    hosts, first = cluster.hosts, cluster.nodes[0]
    ranks_row = f"{len(cluster.nodes)} on {len(hosts)} node{'s' if len(hosts) > 1 else ''}"
    rows = [("ranks", "this process alone: no launcher has started it" if cluster.alone else ranks_row)]
    rows += [(name, version) for name, version in first.versions.items()]
    for host, ranks in hosts.items():
        node = ranks[0]
        device = "CPU" if node.gpus is None else f"{node.gpus} GPUs" + (f", {_gpu(node.gpu)}" if node.gpu else "")
        parts = [
            "rank " + ", ".join(str(each.rank) for each in ranks),
            device,
            f"/dev/shm {node.shm_free // MIB} of {node.shm_size // MIB} MiB free",
            f"{node.output_free / GB:.1f} GB free at {output}",
        ]
        if host in cluster.clocks:
            offset, doubt = cluster.clocks[host]
            parts.append(f"clock {offset:+.4f} s (± {doubt:.4f})")
        rows.append((host, "; ".join(parts)))
    if cluster.reduced is not None:
        library, first_s, later_s = cluster.reduced
        rows.append(("all-reduce", f"{library}, the first {first_s * 1e3:.0f} ms, later {later_s * 1e6:.0f} µs"))
    return rows
