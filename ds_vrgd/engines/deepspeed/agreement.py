"""Check that the ranks agree while the engine is built, because DeepSpeed's own collectives rely on it."""

from __future__ import annotations

import torch
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed import get_process_group_ranks

from ds_vrgd.engines.deepspeed.parallel import Engine, replicas_of, tensor_parallel_group
from ds_vrgd.engines.deepspeed.pipeline import tied_weights
from ds_vrgd.optim import VROptimizer
from ds_vrgd.optim.checks import require_agreement, table_of_arguments, table_of_optimizer, table_of_params


def is_ours(engine: Engine, names: dict[str, type[VROptimizer]]) -> bool:
    """Return whether the engine will have one of our optimizers, as far as that is known before it is made.

    A factory that is not a ``functools.partial`` reveals nothing: the ranks are then compared after it was called.
    """
    client = engine.client_optimizer
    if client is None:
        return engine.optimizer_name() in names
    made = getattr(client, "func", client)
    return isinstance(client, VROptimizer) or (isinstance(made, type) and issubclass(made, VROptimizer))


def require_same_model(engine: Engine, model: torch.nn.Module) -> None:
    """Compare names, shapes, dtypes of the parameters and which are frozen, before DeepSpeed broadcasts them.

    Raises:
        RuntimeError: on every rank, naming what differs between ranks that should hold the same parameters.
    """
    require_agreement(table_of_params(model.named_parameters()) | _settings(engine), replicas=replicas_of(engine))


def require_same_optimizer(engine: Engine, optimizer: VROptimizer) -> None:
    """Compare the optimizer's arguments and param groups, before DeepSpeed builds its wrapper around them.

    Ranks that should hold the same parameters must agree in everything, and tensor-parallel ranks in all but the
    shapes. All ranks must agree in the arguments; the stages of a pipeline, whose param groups may differ, in the
    arguments of the whole optimizer and in the shapes and options of the weights that they share.

    Raises:
        RuntimeError: on every rank, naming what differs.
    """
    replicas, settings = replicas_of(engine), _settings(engine)
    require_agreement(table_of_optimizer(optimizer, engine.param_names) | settings, replicas=replicas)
    if replicas is None:
        return
    if isinstance(engine, PipelineEngine):
        remark = "with ZeRO, DeepSpeed waits for every stage once per param group, so all need as many"
        require_agreement(_of_every_stage(engine, optimizer) | settings, remark)
        _require_same_copies(engine, optimizer)
    else:
        require_agreement(table_of_arguments(optimizer) | settings)
    peers = tensor_parallel_group(engine)
    ranks = [torch.distributed.get_rank()] if peers is None else get_process_group_ranks(peers)
    require_agreement(table_of_optimizer(optimizer, engine.param_names, shapes=False), replicas=ranks)


def _of_every_stage(engine: Engine, optimizer: VROptimizer) -> dict[str, str]:
    """Return what must be alike on stages that hold other layers, perhaps in other param groups."""
    trained = [group for group in optimizer.param_groups if any(param.requires_grad for param in group["params"])]
    table = table_of_arguments(optimizer, groups=False) | {
        "whether it trains anything": str(bool(trained)),
        "whether it trains anything with gamma below 1": str(any(group["gamma"] < 1.0 for group in trained)),
        "whether it trains anything with prenormalize=True": str(any(g.get("prenormalize") for g in trained)),
    }
    return table | (
        {"the number of param groups": str(len(optimizer.param_groups))} if engine.zero_optimization() else {}
    )


def _require_same_copies(engine: Engine, optimizer: VROptimizer) -> None:
    """Compare the shape and the options of each tied weight, in the group in which its gradients are summed.

    With tensor parallelism each rank of a stage may hold a part of another size.
    """
    remark = (
        "these are copies of one weight, which must stay equal. Build the tied layer with the same arguments on "
        "all its stages, and give it the same options in the param groups of all of them"
    )
    mine = {tied.key: tied for tied in tied_weights(engine.module)}
    specs = getattr(engine.module, "_layer_specs", ())
    for key in sorted({spec.key for spec in specs if isinstance(spec, TiedLayerSpec)}):
        table: dict[str, str] = {}
        for index, param in enumerate(mine[key].params if key in mine else ()):
            group = next((g for g in optimizer.param_groups if any(param is p for p in g["params"])), {})
            options = {name: group.get(name) for name in optimizer.defaults}
            options |= {"shape": tuple(param.shape), "requires_grad": param.requires_grad}
            table |= {f"{name} of weight {index} tied as '{key}'": str(value) for name, value in options.items()}
        ranks = get_process_group_ranks(mine[key].group) if key in mine else [torch.distributed.get_rank()]
        require_agreement(table, remark, replicas=ranks)


def _settings(engine: Engine) -> dict[str, str]:
    """Return the settings that decide how many chunks there are, and how they travel."""
    settings = {
        "gradient_accumulation_steps": engine.gradient_accumulation_steps,
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu,
        "gradient_clipping": engine.gradient_clipping,
        "zero_optimization.stage": engine.zero_optimization_stage,
        "zero_optimization.reduce_bucket_size": engine.zero_reduce_bucket_size,
        "fp16.enabled": engine.fp16_enabled,
        "bf16.enabled": engine.bfloat16_enabled,
    }
    return {name: str(value()) for name, value in settings.items()}
