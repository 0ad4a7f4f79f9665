"""A configuration of Megatron-Core, without an import of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.trajectory import ADAPTIVE, ARGUMENTS


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        optimizer: name of its class.
        dtype: of the model: fp32, bf16, fp16.
        accumulation: micro-batches in a step.
        tensor, pipeline: sizes of these groups; what is left of the ranks are data-parallel.
        ddp: of DistributedDataParallelConfig; the buckets are small where they may be.
        config: of OptimizerConfig.
        model: of TransformerConfig.
        tied: whether the output layer has the weights of the embedding.
        arguments: of the optimizer, over those of :data:`tests.support.trajectory.ARGUMENTS`.
        overrides: of param groups, by a pattern of the parameters' names.
        frozen: patterns of the names of parameters that are not trained.
    """

    optimizer: str = "VRLAMB"
    dtype: str = "fp32"
    accumulation: int = 1
    tensor: int = 1
    pipeline: int = 1
    ddp: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    def hyper(self) -> dict[str, Any]:
        return {**ARGUMENTS[self.optimizer], **self.arguments}

    @property
    def of_vectors(self) -> dict[str, Any]:
        return {"adapt": False} if self.optimizer in ADAPTIVE else {}


def watched() -> dict[str, Case]:
    """Return the cases in which the ranks are compared, on four data-parallel ranks."""
    return {
        "VRLAMB": Case(accumulation=2),
        "LAMB, bf16": Case("LAMB", "bf16", 2),
        "gamma = 1": Case("VRAdam", accumulation=2, arguments={"gamma": 1.0}),
        "without the distributed optimizer": Case(accumulation=2, ddp={"use_distributed_optimizer": False}),
    }
