"""Train inside Megatron-Core's distributed optimizer, follow with the dense reference, and compare."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ds_vrgd.doctor.chunks import chunk_gradients, loss_of
from ds_vrgd.doctor.fsdp import MICRO_BATCHES, RATE, SAMPLES, compare, in_both_dtypes
from ds_vrgd.doctor.model import load_model, on_device
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.report import REFUSED, Outcome
from ds_vrgd.engines.megatron import get_optimizer


def examine_megatron(optimizer: str, named: str | None, steps: int) -> Outcome:
    """Train in fp32 and in bf16 on data-parallel ranks, and compare. A collective: the status is the same on each.

    The optimizer, given by its class's name, has default arguments, but no weight decay. For ``named`` see
    :func:`load_model`.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return in_both_dtypes(_examine, optimizer, named, steps)


def _examine(optimizer: str, dtype: str, named: str | None, steps: int) -> Outcome:
    """Train weights of ``dtype``, whose gradients accumulate in fp32 as they do by Megatron's default."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    computed = getattr(torch, dtype)
    half = {"bf16": computed == torch.bfloat16}
    options = OptimizerConfig(
        lr=RATE, min_lr=RATE, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True, **half
    )
    try:
        model, batches = load_model(named, SAMPLES)
        plain = copy.deepcopy(model).to(device, computed)
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=computed, **half)
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        trained = DistributedDataParallel(config, buffers, model.to(device, computed))
        made = get_optimizer(options, [trained], optimizer=optimizer)
    except (ValueError, RuntimeError) as refusal:
        return Outcome([("refused", str(refusal))], REFUSED)
    observer = made.optimizer.observer
    start = observer.whole()
    reference = DenseOptimizer(optimizer, start, lr=RATE, weight_decay=0.0)
    for step in range(steps):
        micro_batches = [on_device(batches(step, index), device) for index in range(MICRO_BATCHES * world)]
        plain.load_state_dict(trained.module.state_dict())
        gradients = chunk_gradients(plain, micro_batches, 1.0 / MICRO_BATCHES, 7919 * step)
        reference.step([_mean(gradients[index::world]) for index in range(world)])
        trained.zero_grad_buffer()
        for index in range(rank, len(micro_batches), world):
            torch.manual_seed(7919 * step + index)
            with nullcontext() if index + world >= len(micro_batches) else trained.no_sync():
                (loss_of(trained, micro_batches[index]) / MICRO_BATCHES).backward()
        trained.finish_grad_sync()
        made.step()
    what = f"{megatron.core.__version__}, {dtype}, {world} data-parallel ranks"
    k = f"{world} ranks, each with the sum of its {MICRO_BATCHES} micro-batches"
    return compare([("Megatron-Core", what), ("k", k)], observer.whole(), start, reference, steps)


def _mean(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean by name; a name that is missing is a zero gradient."""
    names = {name: value for gradient in gradients for name, value in gradient.items()}
    zero = torch.zeros((), dtype=torch.float64)
    return {n: sum((g.get(n, zero) for g in gradients), torch.zeros_like(v)) / len(gradients) for n, v in names.items()}
