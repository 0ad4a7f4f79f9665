"""The pre-flight of two ranks that stand for two nodes, with differences put in by hand; and of one process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from ds_vrgd.doctor.report import Outcome
from ds_vrgd_cli import main
from ds_vrgd_recipes.preflight import cluster, node
from ds_vrgd_recipes.preflight.cluster import NOT_READY, READY, check_cluster
from tests.support.ranks import run_on_ranks

AHEAD_S = 30.0


@contextlib.contextmanager
def as_node(rank: int, *, differs: bool) -> Iterator[None]:
    """Make each rank a machine of its own; if it ``differs``, rank 1 has another torch and a clock that is ahead."""
    versions = node.installed() | ({"torch": "2.6.0"} if differs and rank else {})
    ahead = AHEAD_S if differs and rank else 0.0
    # A second pair of hands on time.time would move the deadlines of torch's own waiting.
    clock = SimpleNamespace(
        time=lambda: time.time() + ahead, monotonic=time.monotonic, sleep=time.sleep, perf_counter=time.perf_counter
    )
    with (
        patch.object(node.socket, "gethostname", lambda: f"node{rank}"),
        patch.object(node, "installed", lambda: versions),
        patch.object(node, "left_segments", list),  # of whatever else this machine does
        patch.object(node, "stale_locks", list),
        patch.object(cluster, "time", clock),
        patch.dict(os.environ, LOCAL_RANK="0"),
    ):
        yield


def run_all(rank: int, folder: Path) -> dict[str, Outcome]:
    outcomes = {}
    shared = folder / "shared" / "run"
    with as_node(rank, differs=False):
        outcomes["alike"] = check_cluster(shared, 0.0, alone=False)
    with as_node(rank, differs=True):
        outcomes["different"] = check_cluster(shared, 0.0, alone=False)
    own = folder / f"disk{rank}"
    own.mkdir()
    with as_node(rank, differs=False), patch.object(cluster, "_UNTIL_SEEN_S", 0.2):
        outcomes["two disks"] = check_cluster(own, 0.0, alone=False)
    with as_node(rank, differs=False), patch.object(Path, "touch", side_effect=OSError("read-only file system")):
        outcomes["read-only"] = check_cluster(shared, 0.0, alone=False)
    with as_node(rank, differs=False), patch.object(cluster.torch.distributed, "all_reduce", _break(rank)):
        outcomes["broken"] = check_cluster(shared, 0.0, alone=False)
    return outcomes


def _break(rank: int) -> object:
    """A collective that fails on rank 1 and is off by one on rank 0."""

    def all_reduce(number: torch.Tensor, group: object = None) -> None:
        if rank:
            raise RuntimeError("connection reset\nby peer")
        number.fill_(4.0)

    return all_reduce


def test_two_nodes(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, run_all, tmp_path)
    assert {name: outcome.status for name, outcome in first.items()} == {
        "alike": READY, "different": NOT_READY, "two disks": NOT_READY, "read-only": NOT_READY, "broken": NOT_READY,
    }  # fmt: skip
    assert {name: outcome.status for name, outcome in second.items()} == {
        name: outcome.status for name, outcome in first.items()
    }
    rows = dict(first["alike"].rows)
    assert rows["ranks"] == "2 on 2 nodes"
    assert rows["torch"] == torch.__version__
    assert rows["verdict"] == "ready"
    assert rows["all-reduce"].startswith("gloo, the first ")
    assert "clock" in rows["node1"]
    different = faults(first["different"])
    assert different[0].startswith(f"node1: torch 2.6.0, the others {torch.__version__}: ")
    assert different[1] == "node1: its clock is 30.0 s ahead of that of node0: synchronise it (chronyc makestep)"
    assert len(different) == 2
    (disks,) = faults(first["two disks"])
    assert disks.startswith(f"node1: a file that rank 0 wrote into {tmp_path / 'disk0'} cannot be seen there")
    (read_only,) = faults(first["read-only"])
    assert read_only.startswith("node0: read-only file system: ")
    failed, wrong = faults(first["broken"])
    assert failed.startswith("node1: the all-reduce failed: connection reset: set NCCL_DEBUG=INFO")
    assert wrong.startswith("node0: an all-reduce gave 4.0 in place of 3.0: ")  # ranks 0 and 1 send 1 and 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # what was written is gone


def faults(outcome: Outcome) -> list[str]:
    return [value for key, value in outcome.rows if key == "NOT READY"]


def test_process_without_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--cluster", "--output", str(tmp_path), "--free", "1e9"]) == NOT_READY
    said = capsys.readouterr().out
    assert "this process alone: no launcher has started it" in said
    assert f"GB free at {tmp_path}, and --free asks for 1000000000.0" in said


def test_options_of_the_other_check_are_refused() -> None:
    assert main(["doctor", "--cluster", "--steps", "5"]) == 2
    assert main(["doctor", "--config", "x.json", "--free", "5"]) == 2
