"""DeepSpeed's MoE: experts have their own ranks and chunks; the whole follows the reference exactly."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_vrgd.engines.deepspeed.refusals import _of_experts
from tests.engines.deepspeed.expert_cases import CASES, EXPERT, EXPERTS, SPOILED, WORLD, ExpertCase, run_all
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

BOUND = 8e-7


def offloading(section: Any) -> Any:
    """Return the configuration that an engine has read from its JSON."""
    return SimpleNamespace(zero_config=SimpleNamespace(offload_optimizer=section))


def named(name: str) -> Any:
    """Return a module with one expert's weight."""
    weight = torch.nn.Parameter(torch.ones(1))
    weight.allreduce = False  # type: ignore[attr-defined]  # DeepSpeed's mark of an expert
    return SimpleNamespace(named_parameters=lambda: [(name, weight)])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, run_all, str(tmp_path_factory.mktemp("experts")))


@pytest.mark.parametrize("case", CASES, ids=ExpertCase.name)
def test_shared_layers_and_experts_follow_the_reference(found: list[dict[str, Any]], case: ExpertCase) -> None:
    for rank, of_rank in enumerate(found):
        seen = of_rank[case.name()]
        assert max(seen["errors"]) <= BOUND
        assert seen["of_plain"] <= 1e-6  # the chunks' mean is the gradient of a plain evaluation of all tokens
        assert (seen["k"], seen["mode"]) == (8, "observe")
        own = EXPERTS // case.spread
        first = rank % case.spread * own
        numbers = {name.removeprefix(EXPERT).split(".")[0] for name in seen["layers"] if name.startswith(EXPERT)}
        assert numbers == {str(number) for number in range(first, first + own)}


def test_noise_scale_of_experts_that_no_rank_holds_all_of_is_an_error(found: list[dict[str, Any]]) -> None:
    assert "expert-parallel" in found[0]["noise"]


@pytest.mark.parametrize("index", range(len(SPOILED)))
def test_a_nan_in_one_expert_is_named_by_its_number_over_all_ranks(found: list[dict[str, Any]], index: int) -> None:
    first = EXPERTS - EXPERTS // SPOILED[index].spread  # of the last rank
    name = f"{EXPERT}{first}.2.bias"
    for rank, seen in enumerate(of_rank["spoiled"][index] for of_rank in found):
        assert (seen["changed"], seen["skipped"], seen["moved"]) == ([], 1, True)
        told = [line for line in seen["log"] if "not finite" in line]
        if rank == 0:
            assert len(told) == 1
            assert f"rank {WORLD - 1}, micro-batch 1 of the window: NaN in '{name}'" in told[0]
        else:
            assert told == []


def test_checkpoint_resumes_bitwise(found: list[dict[str, Any]]) -> None:
    assert found[0]["resumed"] == []


def test_stage_0_is_refused_with_the_way_out(found: list[dict[str, Any]]) -> None:
    assert "MoE layers at zero_optimization.stage=0: not verified. Use stage 1 or 2" in found[0]["stage 0"]


EXPERT_WEIGHT = "moe.deepspeed_moe.experts.deepspeed_experts.0.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"has_moe_layers": False, "mpu": object()}, None),
        ({"zero_optimization_stage": lambda: 3}, "zero_optimization.stage=3: not verified. Use stage 1 or 2"),
        ({"mpu": object()}, "with an mpu .* Leave out the mpu"),
        ({"sequence_parallel_size": 2}, "with an mpu .* Leave out the mpu"),
        ({"fp16_enabled": lambda: True}, "fp16.enabled=true: not verified. Use bf16"),
        ({"get_data_types": lambda: (torch.bfloat16, torch.float32)}, "grad_accum_dtype=fp32 in bf16: not verified"),
        ({"_config": offloading(object())}, "offload_optimizer: not verified. Remove that section"),
        ({"module": named("experts.0.w1")}, "not in a deepspeed.moe.layer.MoE .* Use that layer"),
    ],
)
def test_what_was_never_verified_is_refused(change: dict[str, Any], message: str | None) -> None:
    settings: dict[str, Any] = {
        "has_moe_layers": True,
        "zero_optimization_stage": lambda: 2,
        "sequence_parallel_size": 1,
        "mpu": None,
        "fp16_enabled": lambda: False,
        "get_data_types": lambda: (torch.bfloat16, torch.bfloat16),
        "_config": offloading(None),
        "module": named(EXPERT_WEIGHT),
    }
    reasons = list(_of_experts(SimpleNamespace(**settings | change), SimpleNamespace(param_groups=[])))
    assert len(reasons) == (message is not None), reasons
    assert message is None or re.search(message, reasons[0])


def test_gsnr_of_experts_alone_is_refused() -> None:
    shared, expert = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    expert.allreduce = False  # type: ignore[attr-defined]
    engine = SimpleNamespace(
        has_moe_layers=True, zero_optimization_stage=lambda: 2, sequence_parallel_size=1, mpu=None,
        fp16_enabled=lambda: False, get_data_types=lambda: (torch.float32, torch.float32), _config=offloading(None),
        module=named(EXPERT_WEIGHT),
    )  # fmt: skip
    told = []
    for of_shared, of_expert in ((0.1, 0.1), (0.1, 1.0), (1.0, 1.0), (1.0, 0.1)):
        groups = [{"params": [shared], "gamma": of_shared}, {"params": [expert], "gamma": of_expert}]
        told.append(list(_of_experts(engine, SimpleNamespace(param_groups=groups))))
    assert told[:3] == [[], [], []]
    assert "gamma=1.0 for all but experts" in told[3][0]
