"""The weights and gradients that an engine holds, gathered from all ranks into whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor

from ds_vrgd.engines.deepspeed.observer import EngineObserver, observer_of
from ds_vrgd.moments import gathered
from ds_vrgd.optim import VROptimizer


@contextmanager
def whole_weights(engine: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights in its own dtype, whole, on every rank; a collective. They are not to be kept."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):  # only at stage 3 are they cut
        yield {name: param.data for name, param in engine.module.named_parameters()}


def master_weights(engine: Any) -> dict[str, Tensor]:
    """Return the fp32 weights that the optimizer updates, flat, on the CPU, by layer; a collective."""
    return whole_layers(engine.basic_optimizer, {tensor: tensor.detach() for tensor in observer_of(engine).tensors})


def whole_layers(optimizer: VROptimizer, shards: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the layers in shard-shaped tensors, given by optimizer tensor; a collective.

    Ranks hold a layer's pieces in ascending order, so that the pieces in order of ranks are the layer; under tensor
    parallelism, this rank's part of it.
    """
    mine: dict[str, Tensor] = {}
    observer = optimizer.observer
    assert isinstance(observer, EngineObserver)
    for tensor, values in shards.items():
        layout, flat = observer.layout(tensor), values.flatten()
        for segment in layout.segments:
            mine[layout.layers[segment.layer].name] = flat[segment.start : segment.start + segment.numel].cpu()
    everyone = gathered(mine, observer.partition)
    names = {name: None for pieces in everyone for name in pieces}
    return {name: torch.cat([pieces[name] for pieces in everyone if name in pieces]) for name in names}


class HandedMean:
    """Collects the gradients that DeepSpeed hands to ``step()``, over its calls and over the ranks, flat."""

    def __init__(self, optimizer: VROptimizer) -> None:
        self._pieces: dict[Tensor, Tensor] = {}
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._keep)

    def _keep(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        self._pieces |= {tensor: tensor.grad.flatten().clone() for tensor in tensors if tensor.grad is not None}

    def collect(self) -> dict[str, Tensor]:
        """Return the gradients by layer, and clear them; a collective."""
        pieces, self._pieces = self._pieces, {}
        return whole_layers(self._optimizer, pieces)
