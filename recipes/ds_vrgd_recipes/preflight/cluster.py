"""Pre-flight over all ranks: what each knows of its node, and what only all ranks together can find out.

Everything except for the all-reduce goes through gloo, so that nodes whose NCCL or driver differs are named before NCCL
starts.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_vrgd.doctor.ranks import RankFailed
from ds_vrgd.doctor.report import Outcome
from ds_vrgd_recipes.preflight.node import Node, existing, look_around
from ds_vrgd_recipes.preflight.readiness import Cluster, faults_of, rows_of

READY, NOT_READY = 0, 1
#: Time for all ranks to connect: on a cold start every node reads Python's packages from a shared disk at once.
PATIENCE = timedelta(minutes=5)
_ALL_REDUCE = timedelta(minutes=1)
# An exchange that was not interrupted measures the time best, so the shortest of several counts.
_EXCHANGES = 7
_REPEATS = 10
_UNTIL_SEEN_S = 5.0  # a network disk may be that late
_SEEN_EVERY_S = 0.1


def check_cluster(output: Path, least_free: float, *, alone: bool) -> Outcome:
    """Check all nodes; a collective of all ranks unless ``alone``. Every rank gets the same status, rank 0 the rows.

    Args:
        output: folder that the run writes to, or will make.
        least_free: bytes that the run needs there.
        alone: no launcher has started this process.
    """
    node = look_around(output, alone=alone)
    cluster = Cluster([node]) if alone else together(node, output)
    faults = faults_of(cluster, str(output), least_free)
    status = [NOT_READY if faults else READY]
    if not alone:
        torch.distributed.broadcast_object_list(status, src=0)
    verdict = [("NOT READY", fault) for fault in faults] or [("verdict", "ready")]
    return Outcome([*rows_of(cluster, str(output)), *verdict], status[0])


def join(timeout_s: float) -> None:
    """Make this process one of the ranks, through gloo.

    Raises:
        RankFailed: the ranks did not connect.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
    try:
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        meeting = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RankFailed(
            f"{socket.gethostname()}, rank {os.environ['RANK']}: the {os.environ['WORLD_SIZE']} ranks did not all come "
            f"to {meeting} within {PATIENCE}: {error}\nEither one was not started, which its launcher says, or "
            f"{meeting} cannot be reached from its node"
        ) from None


def together(node: Node, output: Path) -> Cluster:
    """Return what the ranks find out together; a collective. Times are rank 0's, all else is the same on every rank."""
    group = torch.distributed.new_group(backend="gloo", timeout=PATIENCE)
    nodes = _gather(node, group)
    clocks = _clock_offsets([each.host for each in nodes], group)
    unshared, refused = _see_a_file(node, output, group)
    if refused is not None:
        nodes[0] = replace(nodes[0], unwritable=refused)
    cluster = Cluster(nodes, clocks, unshared)
    reduced, total, error = _reduce()
    failed = {one.host: text for one, text in zip(nodes, _gather(error, group), strict=True) if text is not None}
    right = len(nodes) * (len(nodes) + 1) / 2
    wrong = [value for value in _gather(total, group) if value not in (None, right)]
    return replace(cluster, reduced=reduced, failed=failed, wrong_sum=wrong[0] if wrong else None)


def _gather(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def _clock_offsets(hosts: Sequence[str], group: Any) -> dict[str, tuple[float, float]]:
    """Return the seconds that each host's clock is ahead of rank 0's, and their uncertainty (as NTP measures it)."""
    rank, found = torch.distributed.get_rank(), {}
    for host in {host: None for host in hosts if host != hosts[0]}:
        other = hosts.index(host)
        moment = torch.zeros(1, dtype=torch.float64)
        exchanges = []
        for _ in range(_EXCHANGES):
            if rank == 0:
                begin = time.time()
                torch.distributed.send(moment, other, group=group)
                torch.distributed.recv(moment, other, group=group)
                end = time.time()
                exchanges.append(((end - begin) / 2, moment.item() - (begin + end) / 2))
            elif rank == other:
                torch.distributed.recv(moment, 0, group=group)
                torch.distributed.send(torch.tensor([time.time()], dtype=torch.float64), 0, group=group)
        if rank == 0:
            doubt, offset = min(exchanges)
            found[host] = offset, doubt
    shared: list[Any] = [found]
    torch.distributed.broadcast_object_list(shared, src=0, group=group)
    offsets: dict[str, tuple[float, float]] = shared[0]
    return offsets


def _see_a_file(node: Node, output: Path, group: Any) -> tuple[list[str], str | None]:
    """Return the hosts that do not see a file that rank 0 writes into the output, and why it could not be written."""
    place = existing(output)
    said: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        said[0] = f".ds-vrgd-doctor-{uuid.uuid4().hex}"
        try:
            (place / said[0]).touch()
        except OSError as error:
            said[1] = str(error)
    torch.distributed.broadcast_object_list(said, src=0, group=group)
    name, refused = said
    end = time.monotonic() + _UNTIL_SEEN_S
    while not (seen := refused is not None or name in os.listdir(place)) and time.monotonic() < end:
        time.sleep(_SEEN_EVERY_S)
    hosts = [host for host, sees in _gather((node.host, seen), group) if not sees]  # all have looked
    if torch.distributed.get_rank() == 0:
        (place / name).unlink(missing_ok=True)
    return list(dict.fromkeys(hosts)), refused


def _reduce() -> tuple[tuple[str, float, float], float | None, str | None]:
    """All-reduce one number as the training would; return (library, first and later time in seconds), sum, error."""
    accelerator = get_accelerator()
    library, device = "gloo", torch.device("cpu")
    if accelerator.device_name() != "cpu":
        library = accelerator.communication_backend_name()
        device = torch.device(accelerator.device_name(), int(os.environ.get("LOCAL_RANK", "0")))
        # A rank that waits in vain then raises an error, which can be reported; NCCL would end the process.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        accelerator.set_device(device.index)
    times, total = [], None
    try:
        group = torch.distributed.new_group(backend=library, timeout=_ALL_REDUCE)
        for _ in range(1 + _REPEATS):
            number = torch.full((1,), torch.distributed.get_rank() + 1.0, device=device)
            begin = time.perf_counter()
            torch.distributed.all_reduce(number, group=group)
            total = number.item()  # waits for the device
            times.append(time.perf_counter() - begin)
    except RuntimeError as error:
        return (library, float("nan"), float("nan")), None, str(error).partition("\n")[0]
    return (library, times[0], statistics.median(times[1:])), total, None
