"""The benchmarks run and say what they measured; no test here looks at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from benchmarks import report
from benchmarks.bert import NETWORKS
from benchmarks.command import command_line, without_leftovers
from benchmarks.contenders import CONTENDERS
from benchmarks.pages import replace_between
from benchmarks.plan import configurations
from benchmarks.ranks import Rank
from benchmarks.record import PARTS, Record, read_runs
from benchmarks.shards import OWNERSHIPS, dealt, routes_of
from benchmarks.timing import Spread
from benchmarks.training import engine_config
from ds_vrgd.moments import Layer

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent.parent
SPREAD = {"median", "p10", "p90", "count"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command: all parts, the tiny model, two ranks on the CPU."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks", "--ranks", "2", "--output", str(folder), "--stages", "2"]
    command += [
        "--accumulations",
        "2",
        "--contenders",
        "bare",
        "adamw",
        "vrlamb",
        "vrlamb-fused",
        "vrlamb-observe",
        "lamb",
        "deepspeed-lamb",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (found,) = read_runs(folder)
    return found


def test_a_run_tells_with_what_it_was_measured(run: dict[str, Any]) -> None:
    environment = run["environment"]
    assert environment["ranks"] == 2
    assert "--output" not in environment["command"]
    assert {"ds_vrgd", "torch", "DeepSpeed", "triton", "NCCL"} <= environment["versions"].keys()
    assert set(run) == {"environment", *PARTS}


def test_every_collective_and_kernel_has_its_spread(run: dict[str, Any]) -> None:
    assert {row["name"] for row in run["collectives"]} >= {"all-reduce", "reduce-scatter", "all-to-all"}
    for row in run["collectives"] + run["kernels"]:
        assert row["seconds"].keys() == SPREAD
        assert row["elements"] > 0
    assert len(run["kernels"]) == 3, "the others need a GPU"
    for row in run["kernels"]:
        assert row["failure"] is None
        assert row["floor_seconds"] > 0


def test_every_step_has_all_fields(run: dict[str, Any]) -> None:
    rows = {row["contender"]: row for row in run["steps"]}
    assert rows.keys() == {"bare", "adamw", "vrlamb", "vrlamb-fused", "vrlamb-observe", "lamb"}, (
        "FusedLamb exists at stage 0 alone"
    )
    for row in rows.values():
        assert row["failure"] is None
        parts = {"total", "forward", "backward", "step"}
        assert row["seconds"].keys() == parts | {f"host {part}" for part in parts}
        assert all(spread.keys() == SPREAD for spread in row["seconds"].values())
        assert [memory.keys() for memory in row["memory"]] == [{"before", "between_steps", "peak"}] * 2
        assert np.isfinite(row["loss"])


def test_the_report_shows_every_row(run: dict[str, Any]) -> None:
    text = "\n".join(report.section(run))
    for row in run["collectives"] + run["kernels"]:
        assert f"| {row['name']} |" in text
    for row in run["steps"]:
        assert f"| {CONTENDERS[row['contender']].label} |" in text
    assert run["environment"]["versions"]["torch"] in text


def _step(contender: str, median: float, kept: int, **changed: Any) -> dict[str, Any]:
    spread = Spread(median, median, median, 1).to_json()
    names = ["total", "forward", "backward", "step", "host step"]
    row = {"model": "tiny", "stage": 1, "accumulation": 1, "contender": contender, "micro_batch": 2, "parameters": 100}
    memory = {"before": 10, "between_steps": 10 + kept, "peak": 1000}
    return row | {"seconds": dict.fromkeys(names, spread), "memory": [memory] * 2, "failure": None} | changed


def test_ratios_are_to_the_same_stage_and_accumulation() -> None:
    rows = [
        _step("bare", 0.1, 0, stage=None),
        _step("adamw", 0.4, 500),
        _step("adamw", 7.0, 500, stage=2),
        _step("vrlamb-fused", 0.2, 800),
    ]
    run = {
        "environment": {"date": "", "ranks": 2, "card": "", "command": "", "versions": {}},
        "collectives": [],
        "kernels": [],
        "steps": rows,
    }
    (line,) = [line for line in report.section(run) if "VRLAMB, fused" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[-4:-2] == ["0.50", "2.00"]
    # 300 bytes more on a shard of 100 / 2 parameters.
    assert cells[-1] == "+6.00"


def test_extra_bytes_at_stage_0_are_of_the_whole_model() -> None:
    assert report.extra_bytes(_step("lamb", 1, 900, stage=0), _step("adamw", 1, 500, stage=0), 2) == 4.0


def test_a_failure_is_reported_once() -> None:
    failed = {"seconds": None, "memory": None, "failure": "Traceback\nValueError: no compiler"}
    rows = [_step("deepspeed-adamw", 1, 1, stage=stage) | failed for stage in (1, 2)]
    run = {
        "environment": {"date": "", "ranks": 2, "card": "", "command": "", "versions": {}},
        "collectives": [],
        "kernels": [],
        "steps": rows,
    }
    lines = report.section(run)
    assert sum("no compiler" in line for line in lines) == 1
    assert any("stage 1, accumulation 1; stage 2, accumulation 1" in line for line in lines)


def test_nothing_is_measured_after_stage_3_in_its_process() -> None:
    found = configurations({"large": 128, "base": 256}, (1, 2, 3, 0), (1, 4), list(CONTENDERS), ranks=2)
    groups = without_leftovers(found)
    assert [configuration for group in groups for configuration in group] == found
    assert all(len({configuration.stage == 3 for configuration in group}) == 1 for group in groups)


def test_a_run_goes_on_in_the_file_that_an_earlier_process_wrote(tmp_path: Path) -> None:
    path = tmp_path / "run-1.json"
    Record(path, {"date": "1"}).add("steps", {"row": 1})
    Record(path, {"date": "2"}).add("steps", {"row": 2})
    assert read_runs(tmp_path) == [
        {"environment": {"date": "1"}, "collectives": [], "kernels": [], "steps": [{"row": 1}, {"row": 2}]}
    ]


def test_spread_is_numpys_percentiles() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 9.0, 3.0]
    spread = Spread.of(values)
    expected = np.percentile(values, [50, 10, 90])
    np.testing.assert_allclose([spread.median, spread.p10, spread.p90], expected, rtol=1e-12)
    assert spread.count == 6
    with pytest.raises(ValueError, match="no value"):
        Spread.of([])


def test_round_robin_is_deepspeeds_setting_and_exists_where_it_has_an_effect() -> None:
    found = configurations({"large": 128}, (1, 2, 3, 0), (1,), ["adamw-round-robin", "vrlamb-round-robin"], ranks=2)
    assert [c.stage for c in found] == [1, 1, 2, 2]
    for configuration in found:
        config = DeepSpeedZeroConfig(**engine_config(configuration)["zero_optimization"])
        assert config.round_robin_gradients


@pytest.mark.parametrize("ownership", OWNERSHIPS)
def test_routes_send_every_element_to_one_rank(ownership: str) -> None:
    """The shards are DeepSpeed's: flat ones of equal size, or equal slots of every layer."""
    world = 3
    everyone = [
        routes_of(NETWORKS["tiny"], ownership, Rank(index, world, CPU), torch.bfloat16) for index in range(world)
    ]
    owned = [0] * world
    for route in everyone[0]:
        assert sum(numel for _, numel in route.runs) == route.numel
        for rank, numel in route.runs:
            owned[rank] += numel
    assert sum(owned) == sum(param.numel() for _, param in NETWORKS["tiny"].parameters())
    for index, routes in enumerate(everyone):
        assert [route.runs for route in routes] == [route.runs for route in everyone[0]]
        taken = {route.shard: torch.zeros(route.shard.numel(), dtype=torch.int32) for route in routes}
        for route in routes:
            own = dict(route.runs).get(index, 0)
            taken[route.shard][route.shard_start : route.shard_start + own] += 1
        assert max(int(times.max()) for times in taken.values()) == 1
        assert sum(int(times.sum()) for times in taken.values()) == owned[index]


def test_dealt_layers_are_in_deepspeeds_round_robin_order() -> None:
    layers = [Layer(str(index), 1) for index in range(7)]
    theirs, _ = DeepSpeedZeroOptimizer._round_robin_reorder(None, layers, 3)
    assert dealt(layers, 3) == theirs


def test_the_most_important_configurations_come_first() -> None:
    found = configurations({"large": 128, "base": 256}, (1, 2, 3, 0), (1, 4), list(CONTENDERS), ranks=2)
    assert len(set(found)) == len(found)
    assert [c.contender for c in found[:2]] == ["bare", "bare"]
    stage_1 = [c.contender for c in found if (c.model, c.stage, c.accumulation) == ("large", 1, 4)]
    assert stage_1[:4] == ["adamw", "vrlamb", "vrlamb-fused", "vrlamb-observe"]
    assert stage_1[4:] == ["adamw-round-robin", "vrlamb-round-robin", "lamb", "deepspeed-adamw"]
    first = found[2:26]
    assert {c.stage for c in first} == {1, 2, 3}
    assert {c.contender for c in first} == {"adamw", "vrlamb", "vrlamb-fused", "vrlamb-observe"}
    assert {c.model for c in found[: len(found) // 2]} == {"large"}
    assert [c.contender for c in found if c.stage == 0 and c.model == "base" and c.accumulation == 1] == [
        "adamw",
        "vrlamb",
        "vrlamb-observe",
        "lamb",
        "deepspeed-adamw",
        "deepspeed-lamb",
    ]


def test_one_chunk_a_step_leaves_out_who_observes() -> None:
    found = configurations({"tiny": 2}, (1,), (1, 4), ["adamw", "vrlamb-observe"], ranks=1)
    assert [(c.accumulation, c.contender) for c in found] == [(1, "adamw"), (4, "adamw"), (4, "vrlamb-observe")]


def test_the_command_is_kept_without_its_folder() -> None:
    assert command_line(["--ranks", "2", "--output", "/a/b", "--only", "steps"]) == (
        "python -m benchmarks --ranks 2 --only steps"
    )
    assert command_line(["--output=/a/b"]) == "python -m benchmarks"


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- t: begin -->\nold\n<!-- t: end -->\nafter\n")
    for _ in range(2):
        replace_between(page, "t", ["new", ""])
        assert page.read_text() == "before\n<!-- t: begin -->\n\nnew\n\n<!-- t: end -->\nafter\n"
    with pytest.raises(ValueError, match="lacks the marker"):
        replace_between(page, "other", [])
