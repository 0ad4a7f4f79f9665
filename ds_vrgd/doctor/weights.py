"""What an engine holds, put together from all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from torch import Tensor

from ds_vrgd.optim import VROptimizer
from ds_vrgd.zero.observer import EngineObserver, observer_of

Engine = Any


@contextmanager
def whole_weights(engine: Engine) -> Iterator[dict[str, Tensor]]:
    """The model's weights in its own dtype, whole, on every rank; a collective."""
    params = dict(engine.module.named_parameters())
    if engine.zero_optimization_stage() == 3:
        with deepspeed.zero.GatheredParameters(list(params.values())):
            yield {name: param.data.clone() for name, param in params.items()}
    else:
        yield {name: param.data for name, param in params.items()}


def master_weights(engine: Engine) -> dict[str, Tensor]:
    """The fp32 weights that the optimizer updates, flat, on the CPU, by layer; a collective."""
    return whole_layers(engine.basic_optimizer, {tensor: tensor.detach() for tensor in observer_of(engine).tensors})


def whole_layers(optimizer: VROptimizer, shards: Mapping[Tensor, Tensor]) -> dict[str, Tensor]:
    """Layers from shard-shaped tensors, by the optimizer tensor that they belong to; a collective.

    Ranks hold a layer's pieces in ascending order, so their pieces one behind the other are the layer; under tensor
    parallelism, this rank's part of it.
    """
    mine: dict[str, Tensor] = {}
    observer = optimizer.observer
    assert isinstance(observer, EngineObserver)
    for tensor, values in shards.items():
        layout, flat = observer.layout(tensor), values.flatten()
        for segment in layout.segments:
            mine[layout.layers[segment.layer].name] = flat[segment.start : segment.start + segment.numel].cpu()
    if observer.partition is None:
        return mine
    everyone: list[Any] = [None] * torch.distributed.get_world_size(observer.partition)
    torch.distributed.all_gather_object(everyone, mine, group=observer.partition)
    names = {name: None for pieces in everyone for name in pieces}
    return {name: torch.cat([pieces[name] for pieces in everyone if name in pieces]) for name in names}


class HandedMean:
    """What DeepSpeed hands to ``step()``, put together over its calls and over the ranks, flat."""

    def __init__(self, optimizer: VROptimizer) -> None:
        self._pieces: dict[Tensor, Tensor] = {}
        self._optimizer = optimizer
        self._hook = optimizer.register_step_pre_hook(self._note)

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    self._pieces[tensor] = tensor.grad.detach().flatten().clone()

    def collect(self) -> dict[str, Tensor]:
        """By layer; a collective. Begins anew."""
        pieces, self._pieces = self._pieces, {}
        return whole_layers(self._optimizer, pieces)
