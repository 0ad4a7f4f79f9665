"""Where the supported releases of DeepSpeed differ: what older ones lack, and what they get wrong.

What is refused here was measured: docs/COMPATIBILITY.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from ds_vrgd.zero.versions import FUSED, is_among

Engine = Any

#: Holds the gradient of a flat shard; only where fused mode may be chosen.
GradPartitionBufferGroup: Any = getattr(stage_1_and_2, "GradPartitionBufferGroup", None)


def setting(engine: Engine, method: str) -> Any:
    """What the engine's method says about a setting; None in a release that does not have that setting yet."""
    ask = getattr(engine, method, None)
    return None if ask is None else ask()


def end_to_end(params: Sequence[Tensor]) -> list[int]:
    """Where each parameter begins in a flat buffer without gaps, in elements."""
    offsets, end = [], 0
    for param in params:
        offsets.append(end)
        end += param.numel()
    return offsets


def flat_offsets(wrapper: Any) -> list[list[int]]:
    """Where each parameter begins in the flat buffer of its group at stages 1 and 2, in elements.

    Before 0.19.7 there were no gaps between them, and no list.
    """
    offsets: list[list[int]] | None = getattr(wrapper, "round_robin_bit16_offsets", None)
    return offsets if offsets is not None else [end_to_end(group) for group in wrapper.round_robin_bit16_groups]


def too_old_to_fuse(version: str = deepspeed.__version__) -> str | None:
    """Why this release's reduction is not replaced, whatever the configuration; None where it may be."""
    if is_among(version, FUSED):
        return None
    return f"DeepSpeed {version}: the reduction can be replaced in deepspeed{FUSED}. Install that"


def _fixed_in(release: str, check: Callable[[Engine], str | None]) -> Callable[[Engine, str], str | None]:
    """A refusal for the releases before one."""

    def refuse(engine: Engine, version: str) -> str | None:
        found = check(engine) if is_among(version, f"<{release}") else None
        return None if found is None else f"{found}, or install deepspeed>={release} (this is {version})"

    return refuse


def _stage(engine: Engine) -> int:
    return int(engine.zero_optimization_stage())


def _offloads(engine: Engine) -> bool:
    offload = engine._config.zero_config.offload_optimizer
    return offload is not None and str(getattr(offload.device, "value", offload.device)) != "none"


def _copied_gradients(engine: Engine) -> str | None:
    """Stage 1 reduces a copy of the gradient in the accumulation dtype, and throws it away."""
    model, accumulation = engine.get_data_types()
    in_bf16_optimizer = model == torch.bfloat16 and accumulation == torch.float32 and not _offloads(engine)
    if _stage(engine) != 1 or model == accumulation or in_bf16_optimizer:
        return None
    return (
        f"data_types.grad_accum_dtype={engine._config.grad_accum_dtype} with zero_optimization.stage=1: DeepSpeed "
        "hands each rank its own gradient instead of the mean. Use stage 2, leave out grad_accum_dtype"
    )


def _unreduced_on_cpu(engine: Engine) -> str | None:
    """The buckets are sorted by names that tensors on the CPU do not have."""
    contiguous = engine._config.zero_config.contiguous_gradients
    if engine.device.type != "cpu" or _stage(engine) not in (1, 2) or contiguous:
        return None
    return (
        "zero_optimization.contiguous_gradients=false on the CPU: DeepSpeed reduces no gradient there. Set it to true"
    )


def _unfinished_gather_on_cpu(engine: Engine) -> str | None:
    """Of several all-gathers, only the last is waited for; gloo completes them in any order."""
    if engine.device.type != "cpu" or _stage(engine) != 3 or torch.distributed.get_world_size() == 1:
        return None
    return (
        "zero_optimization.stage=3 on the CPU: DeepSpeed computes with weights that are not all there yet, and a run "
        "now and then goes wrong. Use stage 2"
    )


def _ignored_boundaries(engine: Engine) -> str | None:
    """Unknown keys of the JSON are passed over."""
    managed = engine._config._param_dict.get("managed_gradient_accumulation", True)
    if managed or hasattr(engine, "managed_gradient_accumulation"):
        return None
    return (
        "managed_gradient_accumulation=false: this DeepSpeed does not know it and goes by its own count. Leave it out"
    )


#: Each takes the engine and ``deepspeed.__version__``.
DEFECTS: tuple[Callable[[Engine, str], str | None], ...] = (
    _fixed_in("0.19.8", _copied_gradients),
    _fixed_in("0.19.8", _unreduced_on_cpu),
    _fixed_in("0.19.8", _unfinished_gather_on_cpu),
    _fixed_in("0.19.4", _ignored_boundaries),
)


def defects(engine: Engine, version: str = deepspeed.__version__) -> list[str]:
    """Why this release would not be exact under this engine's configuration, where a later one is."""
    return [reason for defect in DEFECTS if (reason := defect(engine, version)) is not None]
