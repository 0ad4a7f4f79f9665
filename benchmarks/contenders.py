"""The contenders: optimizers in a DeepSpeed engine, under DDP, under FSDP2, and the model alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import ds_vrgd

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
        engine: what holds the model; None for the model's forward and backward alone, the floor of every step.
        zero: further keys of the JSON's ``zero_optimization``.
        make: makes the optimizer from param groups; None under DeepSpeed with ``optimizer``.
        reshard: FSDP2's ``reshard_after_forward``; without, it keeps what ZeRO-2 keeps.
        compressed: whether DDP reduces in bf16 (``bf16_compress_hook``).
        peer: the contender that ratios compare it with: torch's AdamW in the same engine.
    """

    label: str
    optimizer: dict[str, Any] | None = None
    stages: tuple[int, ...] = (0, 1, 2, 3)
    observes: bool = False
    engine: Literal["deepspeed", "ddp", "fsdp2"] | None = "deepspeed"
    zero: dict[str, Any] = field(default_factory=dict)
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    reshard: bool = True
    compressed: bool = False
    peer: str = "adamw"

    @property
    def has_stages(self) -> bool:
        """Return whether ZeRO cuts the model."""
        return self.engine == "deepspeed"


def _json(name: str, **params: Any) -> dict[str, Any]:
    return {"type": name, "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, **params}}


def _vrlamb(reduction: str) -> dict[str, Any]:
    return _json("VRLAMB", reduction=reduction, gsnr_dtype="bfloat16")


def torch_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's AdamW, the reference."""
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)


def vrlamb(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return VRLAMB with its default arguments."""
    return ds_vrgd.VRLAMB(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


def lamb(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return LAMB."""
    return ds_vrgd.LAMB(groups, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)


BARE = "bare"
REFERENCE = "adamw"

# Layers are dealt out to the ranks in turn, so that neighbours belong to different ranks.
_DEALT: dict[str, Any] = {"stages": (1, 2), "zero": {"round_robin_gradients": True}}

#: By the name that the command line takes; the most important first.
CONTENDERS: dict[str, Contender] = {
    BARE: Contender("forward + backward alone", engine=None),
    REFERENCE: Contender("torch fused AdamW"),
    "vrlamb": Contender("VRLAMB", _json("VRLAMB"), observes=True),  # its default arguments: scripts/step_time.py
    "vrlamb-fused": Contender("VRLAMB, fused", _vrlamb("fused"), stages=(1, 2, 3), observes=True),
    "vrlamb-observe": Contender("VRLAMB, observe", _vrlamb("observe"), observes=True),
    "adamw-round-robin": Contender("torch fused AdamW, round robin", **_DEALT),
    "vrlamb-round-robin": Contender("VRLAMB, fused, round robin", _vrlamb("fused"), observes=True, **_DEALT),
    "lamb": Contender("VRLAMB, gamma = 1", _json("VRLAMB", gamma=1.0)),
    "ddp-adamw": Contender("DDP, torch fused AdamW", engine="ddp", make=torch_adamw, peer="ddp-adamw"),
    "ddp-adamw-bf16": Contender(
        "DDP reducing in bf16, torch fused AdamW", engine="ddp", make=torch_adamw, compressed=True, peer="ddp-adamw"
    ),
    "ddp-vrlamb": Contender("DDP, VRLAMB", engine="ddp", make=vrlamb, observes=True, peer="ddp-adamw"),
    "fsdp2-adamw": Contender("FSDP2, torch fused AdamW", engine="fsdp2", make=torch_adamw, peer="fsdp2-adamw"),
    "fsdp2-vrlamb": Contender("FSDP2, VRLAMB", engine="fsdp2", make=vrlamb, observes=True, peer="fsdp2-adamw"),
    "fsdp2-lamb": Contender("FSDP2, LAMB", engine="fsdp2", make=lamb, peer="fsdp2-adamw"),
    "fsdp2-adamw-kept": Contender(
        "FSDP2 without resharding, torch fused AdamW",
        engine="fsdp2",
        make=torch_adamw,
        reshard=False,
        peer="fsdp2-adamw-kept",
    ),
    "fsdp2-vrlamb-kept": Contender(
        "FSDP2 without resharding, VRLAMB",
        engine="fsdp2",
        make=vrlamb,
        observes=True,
        reshard=False,
        peer="fsdp2-adamw-kept",
    ),
    "deepspeed-adamw": Contender("DeepSpeed FusedAdam", _json("AdamW")),
    "deepspeed-lamb": Contender("DeepSpeed FusedLamb", _json("Lamb"), stages=(0,)),
}
