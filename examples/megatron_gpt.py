"""A byte-level GPT of Megatron-Core's own classes, with VRLAMB inside Megatron-Core's distributed optimizer.

torchrun --nproc-per-node 2 examples/megatron_gpt.py
torchrun --nproc-per-node 2 -m tests.engines.megatron.without_cuda examples/megatron_gpt.py     (without GPUs)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from text import VOCABULARY, blocks, unigram_entropy
from torch import Tensor

import ds_vrgd.megatron

STEPS, ACCUMULATION, BATCH, LENGTH, LR = 40, 4, 16, 64, 2e-2


def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    """Return the losses of a micro-batch, and what makes one number of them."""
    text = next(batches)
    positions = torch.arange(LENGTH, device=text.device).expand(len(text), LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, device=text.device).tril() < 0.5
    losses = model(text[:, :-1], positions, hidden, labels=text[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def main() -> None:
    """Train for 40 steps of 64 blocks per rank, and print what the optimizer measured."""
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=2, attention_dropout=0.0, hidden_dropout=0.0, bf16=True,
        params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    gpt = GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="learned_absolute")
    options = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=50000)
    model = DistributedDataParallel(config, options, Float16Module(config, gpt.to(device)))
    optimizer = ds_vrgd.megatron.get_optimizer(  # was: get_megatron_optimizer
        OptimizerConfig(lr=LR, min_lr=LR, weight_decay=0.01, bf16=True, use_distributed_optimizer=True, clip_grad=1.0),
        [model],
        optimizer="VRLAMB",
    )
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=LR, min_lr=LR, lr_warmup_steps=4, lr_decay_steps=STEPS, start_wd=0.01,
        lr_decay_style="constant", end_wd=0.01, wd_incr_steps=STEPS, wd_incr_style="constant",
    )  # fmt: skip
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync

    text, order = blocks(LENGTH + 1), torch.Generator().manual_seed(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for _ in range(STEPS):
        drawn = text[torch.randint(len(text), (ACCUMULATION, ranks, BATCH), generator=order)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(drawn[:, rank].to(device)), model=[model],
            num_microbatches=ACCUMULATION, seq_length=LENGTH, micro_batch_size=BATCH, forward_only=False,
        )  # fmt: skip
        succeeded, _, _ = optimizer.step()
        if succeeded:
            schedule.step(1)
    mean = torch.stack([entry["loss"] for entry in losses]).float().mean()
    dist.all_reduce(mean)
    if rank == 0:
        stats = ds_vrgd.gsnr_stats(optimizer)
        print(f"k = {stats.k}, mean GSNR over the layers {stats.means().mean_ratio:.3f}")
        print(f"loss {float(mean) / ranks:.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
