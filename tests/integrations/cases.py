"""What is trained with the Trainer on two ranks, and run once a session."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.hf import Case, attempt, run_case
from tests.support.hf_resume import resume

OFFLOADED: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

#: By name. These run always, MORE of them with the slow tests.
TRAINED: dict[str, Case] = {
    "ddp": Case(None),
    "ddp, clipped": Case(None, clip=0.3),
    "ddp, mean of means": Case(None, counts=False),
    "ddp, bf16 autocast": Case(None, dtype="bf16"),
    "ddp, plain Trainer": Case(None, mixin=False),
    "ZeRO-0": Case(0),
    "ZeRO-1, JSON": Case(1, "json"),
    "ZeRO-2": Case(2),
    "ZeRO-2, JSON, clipped": Case(2, "json", clip=0.3),
    "ZeRO-2, plain Trainer": Case(2, mixin=False),
    "ZeRO-2, bf16": Case(2, dtype="bf16"),
    "ZeRO-2, fp16": Case(2, dtype="fp16", config={"fp16": {"enabled": "auto", "initial_scale_power": 8}}),
    "ZeRO-3, JSON": Case(3, "json"),
}
MORE: dict[str, Case] = {
    "ddp, VRAdamW from a factory": Case(None, "factory", "VRAdamW"),
    "ddp, one micro-batch": Case(None, accumulation=1),
    "ZeRO-0, bf16": Case(0, dtype="bf16"),
    "ZeRO-1": Case(1),
    "ZeRO-2, mean of means": Case(2, counts=False),
    "ZeRO-2, VRAdamW from a factory": Case(2, "factory", "VRAdamW"),
    "ZeRO-2, beside DeepSpeed's reduction": Case(2, "json", config=OFFLOADED),
    "ZeRO-3": Case(3),
    "ZeRO-3, JSON, bf16, clipped": Case(3, "json", dtype="bf16", clip=0.3),
}  # fmt: skip

RESUMED: dict[str, Case] = {"ddp": Case(None), "ZeRO-2, JSON, bf16": Case(2, "json", dtype="bf16"), "ZeRO-3": Case(3)}
RESUMED_MORE: dict[str, Case] = {
    "ddp, bf16 autocast": Case(None, dtype="bf16"),
    "ZeRO-0": Case(0),
    "ZeRO-1": Case(1),
    "ZeRO-2, fp16": Case(2, dtype="fp16", config={"fp16": {"enabled": "auto", "initial_scale_power": 8}}),
}


def train_all(rank: int, folder: str, slow: bool) -> dict[tuple[str, str], Any]:
    """Outcomes by kind and name."""
    found: dict[tuple[str, str], Any] = {("imported", "transformers"): "transformers" in sys.modules}
    for name, case in (MORE if slow else TRAINED).items():
        found["trained", name] = attempt(run_case, case, Path(folder, name))
    for name, case in (RESUMED_MORE if slow else RESUMED).items():
        found["resumed", name] = attempt(resume, case, Path(folder, f"resumed {name}"))
    return found
