"""Do the ranks agree? Asked while the engine is built, before DeepSpeed's own collectives rely on it."""

from __future__ import annotations

from typing import Any

import torch

from ds_vrgd.optim import VROptimizer
from ds_vrgd.optim.agreement import require_agreement, table_of_arguments, table_of_optimizer, table_of_params
from ds_vrgd.zero.groups import replicas_of, tensor_parallel_group

Engine = Any


def is_ours(engine: Engine, names: dict[str, type[VROptimizer]]) -> bool:
    """Whether the engine will have one of our optimizers, as far as can be told before it is made.

    A factory that is not a ``functools.partial`` tells nothing: then the ranks are compared when it has been called.
    """
    client = engine.client_optimizer
    if client is None:
        return engine.optimizer_name() in names
    made = getattr(client, "func", client)
    return isinstance(client, VROptimizer) or (isinstance(made, type) and issubclass(made, VROptimizer))


def require_same_model(engine: Engine, model: torch.nn.Module) -> None:
    """Compare names, shapes, dtypes of the parameters and which are frozen, before DeepSpeed broadcasts them.

    Raises:
        RuntimeError: on every rank, naming what differs, where ranks that should hold the same parameters do not.
    """
    if torch.distributed.is_initialized():
        require_agreement(table_of_params(model.named_parameters()) | _settings(engine), replicas=replicas_of(engine))


def require_same_optimizer(engine: Engine, optimizer: VROptimizer) -> None:
    """Compare the optimizer's arguments and param groups, before DeepSpeed builds its wrapper around them.

    The arguments over all ranks, the parameters over those that should hold the same ones; over those that should hold
    parts of the same ones, all but the shapes.

    Raises:
        RuntimeError: on every rank, naming what differs, where they do.
    """
    if not torch.distributed.is_initialized():
        return
    replicas, settings = replicas_of(engine), _settings(engine)
    require_agreement(table_of_optimizer(optimizer, engine.param_names) | settings, replicas=replicas)
    if replicas is None:
        return
    require_agreement(table_of_arguments(optimizer) | settings)
    peers = tensor_parallel_group(engine)
    ranks = [torch.distributed.get_rank()] if peers is None else torch.distributed.get_process_group_ranks(peers)
    require_agreement(table_of_optimizer(optimizer, engine.param_names, shapes=False), replicas=ranks)


def _settings(engine: Engine) -> dict[str, str]:
    """What decides how many chunks there are, and how they travel."""
    return {
        "gradient_accumulation_steps": str(engine.gradient_accumulation_steps()),
        "train_micro_batch_size_per_gpu": str(engine.train_micro_batch_size_per_gpu()),
        "gradient_clipping": str(engine.gradient_clipping()),
        "zero_optimization.stage": str(engine.zero_optimization_stage()),
        "zero_optimization.reduce_bucket_size": str(engine.zero_reduce_bucket_size()),
        "fp16.enabled": str(engine.fp16_enabled()),
        "bf16.enabled": str(engine.bfloat16_enabled()),
    }
