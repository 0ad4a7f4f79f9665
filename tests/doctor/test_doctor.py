"""The doctor on the shipped configurations, on what is exact, on what is not, and on what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd.doctor.model import TinyTransformer
from ds_vrgd.doctor.report import EXACT, NOT_EXACT, REFUSED, Outcome
from ds_vrgd.doctor.settings import prepare
from ds_vrgd.doctor.trial import examine
from ds_vrgd.engines.deepspeed.configs import read_config
from ds_vrgd.engines.deepspeed.held import GradientScale
from ds_vrgd.moments.buckets import ALIGNMENT
from ds_vrgd_cli import main
from tests.support.ranks import run_on_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
#: The baseline's configuration has nothing of ours, which is the doctor's first sentence about it.
BASELINE = "ds_adamw.json"
SHIPPED = sorted(path.name for path in CONFIGS.glob("*.json") if path.name != BASELINE)
VRLAMB: dict[str, Any] = {
    "optimizer": {"type": "VRLAMB", "params": {"lr": 4e-3}},
    "zero_optimization": {"stage": 2},
    "gradient_accumulation_steps": 2,
}
MODELS = "tests.doctor.cases"

#: Name -> (what differs from VRLAMB, the model).
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "stage 0": ({"zero_optimization": {"stage": 0}}, None),
    "stage 3, bf16, offload": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": True}}, None,
    ),
    "LAMB, fp16": (
        {"optimizer": {"type": "LAMB", "params": {"lr": 4e-3}}, "fp16": {"enabled": True, "initial_scale_power": 24}},
        None,
    ),
    # DeepSpeed keeps the gradient of a layer that the first micro-batch of a window does not use.
    "LAMB, stage 3": ({"optimizer": {"type": "LAMB", "params": {"lr": 4e-3}}, "zero_optimization": {"stage": 3}}, None),
    "LAMB, stage 2, offload": (
        {
            "optimizer": {"type": "LAMB", "params": {"lr": 4e-3}},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        None,
    ),
    "observe, stage 3": (
        {
            "optimizer": {"type": "VRLARS", "params": {"lr": 1.0, "trust_coefficient": 0.02, "reduction": "observe"}},
            "zero_optimization": {"stage": 3},
        },
        None,
    ),
    "warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4, "warmup_num_steps": 1000}}}, None,
    ),
    "own model": ({}, f"{MODELS}:make_regression"),
    "no function": ({}, f"{MODELS}:make_somthing"),
    "no model": ({}, f"{MODELS}:make_nothing"),
    "refused": ({"gradient_allreduce_op": "sum", "fp16": {"enabled": True}, "zero_optimization": {"stage": 0}}, None),
    "bad argument": ({"optimizer": {"type": "VRLAMB", "params": {"lr": 1e-3, "gamma": 1.5}}}, None),
    "autocast at stage 3": (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}, None,
    ),
}  # fmt: skip


def run_all(rank: int) -> dict[str, Outcome]:
    outcomes = {name: examine(prepare(read_config(CONFIGS / name), 2, "cpu"), None, 3) for name in SHIPPED}
    for name, (change, model) in CASES.items():
        outcomes[name] = examine(prepare(copy.deepcopy(VRLAMB | change), 2, "cpu"), model, 3)
    outcomes["wrong scale"] = with_wrong_scale()
    return outcomes


def with_wrong_scale() -> Outcome:
    """One part in a thousand too much of the gradient."""
    right = GradientScale.of_total

    def wrong(self: GradientScale, device: torch.device) -> Tensor:
        return right(self, device) * 1.001

    GradientScale.of_total = wrong  # type: ignore[method-assign]
    try:
        config = VRLAMB | {"optimizer": {"type": "VRMomentum", "params": {"lr": 0.1}}}
        return examine(prepare(config, 2, "cpu"), None, 3)
    finally:
        GradientScale.of_total = right  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_on_ranks(2, run_all)


@pytest.fixture(scope="module")
def outcomes(ranks: list[dict[str, Outcome]]) -> dict[str, Outcome]:
    return ranks[0]


def row(outcome: Outcome, key: str) -> str:
    return "\n".join(value for name, value in outcome.rows if name == key)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configuration_is_exact(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].status == EXACT, outcomes[name].rows


def test_shipped_baseline_has_nothing_to_check() -> None:
    with pytest.raises(ValueError, match=r'optimizer.type="AdamW" .* nothing to check; set it to "VRAdamW"'):
        prepare(read_config(CONFIGS / BASELINE), 2, "cpu")


@pytest.mark.parametrize(
    ("name", "wrapper", "mode"),
    [
        ("plain", "DeepSpeedZeroOptimizer", 'fused: reduction="auto"'),
        ("stage 0", "none: the optimizer has the model's own parameters", "observe: zero_optimization.stage=0"),
        ("stage 3, bf16, offload", "DeepSpeedZeroOptimizer_Stage3", "observe: zero_optimization.offload_optimizer"),
        ("LAMB, fp16", "DeepSpeedZeroOptimizer", 'fused: reduction="auto"'),
        ("autocast at stage 3", "DeepSpeedZeroOptimizer_Stage3", 'fused: reduction="auto"'),
        ("own model", "DeepSpeedZeroOptimizer", 'fused: reduction="auto"'),
    ],
)
def test_exact_configuration_is_reported_with_wrapper_and_mode(
    outcomes: dict[str, Outcome], name: str, wrapper: str, mode: str
) -> None:
    assert outcomes[name].status == EXACT, outcomes[name].rows
    assert row(outcomes[name], "wrapper") == wrapper
    assert row(outcomes[name], "mode").startswith(mode)


@pytest.mark.parametrize("name", ["LAMB, stage 3", "LAMB, stage 2, offload", "observe, stage 3"])
def test_layer_without_a_gradient_in_some_micro_batches_is_exact(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].status == EXACT, outcomes[name].rows


def test_cost_is_what_was_held_and_sent(outcomes: dict[str, Outcome]) -> None:
    elements = sum(param.numel() for param in TinyTransformer().parameters())
    assert elements % 2, "nothing needs padding"
    sent = int(row(outcomes["plain"], "sent for moments").split(" ")[0].replace(",", ""))
    # Both param groups are cut in two, and a rank sends the other's half: one region, padded.
    assert abs(sent - 4 * elements / 2) <= 4 * ALIGNMENT
    assert row(outcomes["plain"], "moments") == "8.0 bytes per element of the shard before a step, 0.0 between steps"
    assert row(outcomes["plain"], "optimizer state").endswith("= 12.0 bytes per element of the shard")
    assert row(outcomes["LAMB, fp16"], "optimizer state").endswith("= 8.0 bytes per element of the shard")


def test_layers_are_counted(outcomes: dict[str, Outcome]) -> None:
    model = TinyTransformer()
    count, matrices = len(list(model.parameters())), sum(param.dim() > 1 for param in model.parameters())
    assert row(outcomes["plain"], "layers").startswith(f"{count} found, {count} with GSNR, {matrices} with a trust")
    assert row(outcomes["LAMB, fp16"], "layers").startswith(f"{count} found, 0 with GSNR, {matrices} with a trust")


def test_skipped_steps_are_made_up_for(outcomes: dict[str, Outcome]) -> None:
    taken, skipped, *_ = row(outcomes["LAMB, fp16"], "steps").split(" ")[0:2]
    assert taken == "3,"
    assert int(skipped) > 0


def test_rate_is_raised_until_the_weights_move(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["warm-up"].status == EXACT
    assert "more with a raised learning rate" in row(outcomes["warm-up"], "steps")
    assert "raised" not in row(outcomes["plain"], "steps")


def test_wrong_scale_is_not_exact(ranks: list[dict[str, Outcome]]) -> None:
    assert [outcomes["wrong scale"].status for outcomes in ranks] == [NOT_EXACT, NOT_EXACT]
    assert "is above 8.0e-07, most of it in " in row(ranks[0]["wrong scale"], "NOT EXACT")


def test_every_refused_setting_is_a_row(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["refused"].status == REFUSED
    refused = [value for key, value in outcomes["refused"].rows if key == "refused"]
    assert len(refused) == 2
    assert "Use stage 1, 2 or 3, or bf16" in refused[0]
    assert "gradient_allreduce_op=sum" in refused[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad argument", "gamma=1.5 is out of range"),
        ("no function", "make_somthing"),
        ("no model", "return (model, batches)"),
    ],
)
def test_what_cannot_be_checked_is_refused(outcomes: dict[str, Outcome], name: str, message: str) -> None:
    assert outcomes[name].status == REFUSED
    assert message in row(outcomes[name], "refused")


def test_command_starts_the_ranks_and_prints_the_table() -> None:
    config = str(CONFIGS / "ds_vrgd.json")
    command = [sys.executable, "-m", "ds_vrgd.cli", "doctor", "--deepspeed_config", config, "--world", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == EXACT, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("|") for line in lines), "the table alone is standard output"
    rows = [line.strip("| ").split(" | ") for line in lines]
    table = {cells[0].strip(): cells[-1].strip() for cells in rows}
    assert table["verdict"] == "exact"
    assert table["configuration"] == config
    assert table["optimizer"] == "VRLAMB, lr=0.004, weight_decay=0.01, gamma=0.1"
    assert table["torch"] == torch.__version__
    assert table["k"] == "4 = 2 ranks x 2 micro-batches"


@pytest.mark.slow
def test_ranks_of_a_launcher_are_taken() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command = [*launcher, "ds_vrgd.cli", "doctor", "--json", "--config", str(CONFIGS / "ds_vrgd.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == EXACT, done.stderr
    found = json.loads(done.stdout)  # of rank 0 alone
    assert (found["exit_status"], found["table"]["verdict"]) == (EXACT, ["exact"])
    numbers = found["numbers"]
    assert 0.0 < numbers["error"] <= numbers["tolerance"] == 8e-7
    assert (numbers["mode"], numbers["ranks"], numbers["micro_batches"]) == ("fused", 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "ds.json cannot be read"),
        ('{\n"optimizer": \n}', "ds.json is not JSON: line 3"),
        ('{"optimizer": {"type": "AdamW"}}', 'set it to "VRAdamW"'),
        ("[" * 100_000, "ds.json is nested too deeply"),
        ('{"optimizer": {"type": "VRLAMB"}, "gradient_cliping": 1.0}', 'did you mean "gradient_clipping"?'),
        ('{"optimizer": {"type": "VRLAMB"}, "fp16": {"enabled": true}, "bf16": {"enabled": true}}', "set one of them"),
    ],
)
def test_unusable_file_is_an_error_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["doctor", "--deepspeed_config", str(path)]) == REFUSED
    told = capsys.readouterr()
    assert message in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
