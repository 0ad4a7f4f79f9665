"""Which ranks hold the same parameters, which hold parts of one, and which step together."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from torch import Tensor

from ds_vrgd.moments import Layer
from ds_vrgd.zero.experts import expert_names, share_of

Engine = Any


def everyone(engine: Engine) -> Any:
    """Process group of all ranks that step together: DeepSpeed's own where the model is only replicated."""
    group = engine.seq_data_parallel_group
    alone = torch.distributed.get_world_size(group) == torch.distributed.get_world_size()
    return group if alone else torch.distributed.group.WORLD


def tensor_parallel_group(engine: Engine) -> Any | None:
    """Process group over which split weights are cut; None without tensor parallelism. Also while the engine is built.

    DeepSpeed's module for sequence parallelism is an mpu, too, of ranks that all hold the same weights.
    """
    mpu = engine.mpu
    group = None if hasattr(mpu, "initialize_sequence_parallel") else bwc_tensor_model_parallel_group(mpu)
    return group if group is not None and torch.distributed.get_world_size(group) > 1 else None


def model_parallel_group(engine: Engine) -> Any | None:
    """Process group of the ranks that hold one copy of the model together; None where every rank holds one."""
    return engine.mpu.get_model_parallel_group() if engine.mp_world_size > 1 else None


def is_split(param: Tensor) -> bool:
    """Whether a weight is marked as cut over the tensor-parallel group, as Megatron and AutoTP mark them."""
    return bool(is_model_parallel_parameter(param))


class Layers:
    """Makes the layers of an engine's parameters. A collective of the tensor-parallel ranks.

    Args:
        engine: the engine, built.
    """

    def __init__(self, engine: Engine) -> None:
        self._names = engine.param_names | expert_names(engine.param_names)
        self._group = tensor_parallel_group(engine)
        self._is_first = self._group is None or torch.distributed.get_rank(self._group) == 0
        self._numels: dict[Tensor, int] = {}
        split = [param for param in self._names if self._group is not None and is_split(param)]
        if split:
            numels = torch.tensor([numel_of(param) for param in split], device=engine.device)
            torch.distributed.all_reduce(numels, group=self._group)
            self._numels = dict(zip(split, numels.tolist(), strict=True))

    def of(self, param: Tensor, partition: Any | None = None) -> Layer:
        """The logical tensor that ``param`` is, or is a part of.

        Args:
            param: of the model.
            partition: process group over which the optimizer wrapper cuts it; None where it keeps it whole.
        """
        split = self._group if param in self._numels else None
        groups = tuple(group for group in (partition, split) if group is not None)
        name, numel = self._names.get(param, "unnamed"), self._numels.get(param, numel_of(param))
        return Layer(name, numel, groups, self._counts(param), share_of(param))

    def _counts(self, param: Tensor) -> bool:
        """DeepSpeed's rule: split weights count on every tensor-parallel rank, copies on the first alone."""
        return (self._is_first or param in self._numels) and not getattr(param, PIPE_REPLICATED, False)


def numel_of(param: Tensor) -> int:
    """Elements of a parameter on the ranks over which ZeRO cuts it together."""
    return int(getattr(param, "ds_numel", param.numel()))


def replicas_of(engine: Engine) -> list[int] | None:
    """Global ranks that hold the same parameters as this one; None for all. Also while the engine is being built."""
    mpu = engine.mpu
    if mpu is None:
        return None
    sequences = getattr(mpu, "get_sequence_data_parallel_group", None)
    group = mpu.get_data_parallel_group() if sequences is None else sequences()
    return list(torch.distributed.get_process_group_ranks(group))
