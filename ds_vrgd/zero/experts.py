"""DeepSpeed's MoE: whose tokens an expert's gradient has seen, what the expert is called, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import Tensor

Engine = Any

_NUMBER = re.compile(r"(.*\bdeepspeed_experts\.)(\d+)(\..*)")


def share_of(param: Tensor) -> int:
    """Ranks whose tokens one gradient of this parameter has seen: its expert-parallel group; 1 for no expert."""
    return int(groups._get_expert_parallel_world_size(getattr(param, "group_name", None))) if is_moe_param(param) else 1


def expert_names(names: Mapping[Tensor, str]) -> dict[Tensor, str]:
    """Names of this rank's experts with the number that DeepSpeed's checkpoints give them, over all ranks.

    Args:
        names: of all parameters; each rank counts its own experts from 0.
    """
    found = {
        param: match for param, name in names.items() if (match := _NUMBER.fullmatch(name)) and is_moe_param(param)
    }
    local: dict[str, int] = {}
    for match in found.values():
        local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
    numbered = {}
    for param, (before, number, behind) in ((param, match.groups()) for param, match in found.items()):
        group: str = param.group_name  # type: ignore[attr-defined]
        first = groups._get_expert_parallel_rank(group) * local[before]
        numbered[param] = f"{before}{first + int(number)}{behind}"
    return numbered


def refuse_experts(engine: Engine) -> str | None:
    """Why experts cannot be exact in this engine; None where they can, or where there are none."""
    if not engine.has_moe_layers:
        return None
    if engine.zero_optimization_stage() not in (1, 2):
        stage = engine.zero_optimization_stage()
        return f"MoE layers at zero_optimization.stage={stage}: not verified. Use stage 1 or 2"
    if engine.sequence_parallel_size > 1 or engine.mpu is not None:
        return "MoE layers with an mpu (tensor, sequence or pipeline parallelism): not verified. Leave out the mpu"
    if engine.fp16_enabled():
        return "MoE layers with fp16.enabled=true: not verified. Use bf16"
    if engine._config.zero_config.offload_optimizer is not None:
        return "MoE layers with zero_optimization.offload_optimizer: not verified. Remove that section"
    if engine.get_data_types() == (torch.bfloat16, torch.float32):
        return "MoE layers with data_types.grad_accum_dtype=fp32 in bf16: not verified. Leave it out"
    if not all(_NUMBER.fullmatch(name) for name, param in engine.module.named_parameters() if is_moe_param(param)):
        return "experts that are not in a deepspeed.moe.layer.MoE (AutoEP): not verified. Use that layer"
    return None
