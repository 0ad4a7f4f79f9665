"""Who is compared: optimizers in a DeepSpeed engine, and the model alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01


@dataclass(frozen=True)
class Contender:
    """An optimizer and where it can be measured.

    Attributes:
        label: how tables call it.
        optimizer: the ``optimizer`` section of a DeepSpeed JSON, or None for torch's fused AdamW as client optimizer.
        stages: the ZeRO stages at which it exists.
        observes: whether it needs at least two chunks a step.
        has_engine: False for the model's forward and backward alone, the floor of every step.
        zero: further keys of the JSON's ``zero_optimization``.
    """

    label: str
    optimizer: dict[str, Any] | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    observes: bool = False
    has_engine: bool = True
    zero: dict[str, Any] = field(default_factory=dict)


def _json(name: str, **params: Any) -> dict[str, Any]:
    return {"type": name, "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, **params}}


def _vrlamb(reduction: str) -> dict[str, Any]:
    return _json("VRLAMB", reduction=reduction, gsnr_dtype="bfloat16")


BARE = "bare"
REFERENCE = "adamw"

# Layers are dealt out to the ranks in turn, so that neighbours belong to different ranks.
_DEALT: dict[str, Any] = {"stages": (1, 2), "zero": {"round_robin_gradients": True}}

#: By the name that the command line takes; the most important first.
CONTENDERS: dict[str, Contender] = {
    BARE: Contender("forward + backward alone", has_engine=False),
    REFERENCE: Contender("torch fused AdamW"),
    "vrlamb-fused": Contender("VRLAMB, fused", _vrlamb("fused"), stages=(1, 2, 3), observes=True),
    "vrlamb-observe": Contender("VRLAMB, observe", _vrlamb("observe"), observes=True),
    "adamw-round-robin": Contender("torch fused AdamW, round robin", **_DEALT),
    "vrlamb-round-robin": Contender("VRLAMB, fused, round robin", _vrlamb("fused"), observes=True, **_DEALT),
    "lamb": Contender("VRLAMB, gamma = 1", _json("VRLAMB", gamma=1.0)),
    "deepspeed-adamw": Contender("DeepSpeed FusedAdam", _json("AdamW")),
    "deepspeed-lamb": Contender("DeepSpeed FusedLamb", _json("Lamb"), stages=(0,)),
}


def torch_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The reference."""
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
