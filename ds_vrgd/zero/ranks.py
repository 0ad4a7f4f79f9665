"""Do the ranks agree? Asked while the engine is built, before DeepSpeed's own collectives rely on it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vrgd.optim import VROptimizer
from ds_vrgd.optim.agreement import require_agreement, table_of_arguments, table_of_optimizer, table_of_params
from ds_vrgd.zero.groups import replicas_of, tensor_parallel_group
from ds_vrgd.zero.pipeline import tied_weights

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

    The arguments over all ranks (between the stages of a pipeline, those of the whole and of weights that they share),
    the parameters over those that should hold the same ones; over those that should hold parts of the same ones, all
    but the shapes.

    Raises:
        RuntimeError: on every rank, naming what differs, where they do.
    """
    if not torch.distributed.is_initialized():
        return
    replicas, settings = replicas_of(engine), _settings(engine)
    require_agreement(table_of_optimizer(optimizer, engine.param_names) | settings, replicas=replicas)
    if replicas is None:
        return
    if isinstance(engine, PipelineEngine):
        remark = "with ZeRO, DeepSpeed waits for every stage once a param group, so all need as many"
        require_agreement(_of_every_stage(engine, optimizer) | settings, remark)
        _require_same_copies(engine, optimizer)
    else:
        require_agreement(table_of_arguments(optimizer) | settings)
    peers = tensor_parallel_group(engine)
    ranks = [torch.distributed.get_rank()] if peers is None else torch.distributed.get_process_group_ranks(peers)
    require_agreement(table_of_optimizer(optimizer, engine.param_names, shapes=False), replicas=ranks)


def _of_every_stage(engine: Engine, optimizer: VROptimizer) -> dict[str, str]:
    """What must be alike on stages that hold other layers, perhaps in other param groups."""
    arguments = table_of_arguments(optimizer, groups=False)
    trained = [group for group in optimizer.param_groups if any(param.requires_grad for param in group["params"])]
    arguments["whether it trains anything"] = str(bool(trained))
    arguments["whether it trains anything with gamma below 1"] = str(any(group["gamma"] < 1.0 for group in trained))
    arguments["whether it trains anything with prenormalize=True"] = str(any(g.get("prenormalize") for g in trained))
    if engine.zero_optimization():
        arguments["the number of param groups"] = str(len(optimizer.param_groups))
    return arguments


def _require_same_copies(engine: Engine, optimizer: VROptimizer) -> None:
    """Compare the options of weights that several stages hold a copy of.

    Raises:
        RuntimeError: on every rank, naming what differs.
    """
    mine: dict[str, dict[str, str]] = {}
    for tied in tied_weights(engine.module):
        for place, param in enumerate(tied.params):
            group = next((g for g in optimizer.param_groups if any(param is p for p in g["params"])), {})
            options = {name: str(group.get(name)) for name in optimizer.defaults}
            label = f"weight {place} tied as '{tied.key}'"
            mine[label] = options | {"shape": str(tuple(param.shape)), "requires_grad": str(param.requires_grad)}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    first: dict[str, tuple[int, dict[str, str]]] = {}
    for rank, of_rank in enumerate(everyone):
        for name, options in of_rank.items():
            where, expected = first.setdefault(name, (rank, options))
            for option, value in options.items():
                if value != expected[option]:
                    raise RuntimeError(
                        f"{option} of {name} is {expected[option]} on rank {where} and {value} on rank {rank}, and "
                        "its copies would part. Put them in param groups with the same options on all their stages."
                    )


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
