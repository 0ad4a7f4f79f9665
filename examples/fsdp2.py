"""A byte-level GPT-2 sharded by PyTorch's FSDP2, with VRLAMB.

torchrun --nproc-per-node 2 examples/fsdp2.py     (on a GPU machine as on a CPU)
"""

from __future__ import annotations

import os
from collections import deque

import torch
import torch.distributed as dist
from text import VOCABULARY, blocks, unigram_entropy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import ds_vrgd

STEPS, ACCUMULATION, BATCH = 40, 4, 16


def main() -> None:
    """Train for 40 steps of 64 blocks per rank, and print what the optimizer measured."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in [*model.transformer.h, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = ds_vrgd.VRLAMB(model.parameters(), lr=2e-2, weight_decay=0.01)
    ds_vrgd.attach(model, optimizer)

    text, order = blocks(64), torch.Generator().manual_seed(1)
    losses: deque[torch.Tensor] = deque(maxlen=ACCUMULATION)
    for _ in range(STEPS):
        drawn = text[torch.randint(len(text), (ACCUMULATION, ranks, BATCH), generator=order)]
        for batch in drawn[:, rank].to(device):
            loss = model(input_ids=batch, labels=batch).loss
            (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = torch.stack([*losses]).mean()
    dist.all_reduce(mean)
    if rank == 0:
        stats = ds_vrgd.gsnr_stats(optimizer)
        print(f"k = {stats.k}, mean GSNR over the layers {stats.means().mean_ratio:.3f}")
        print(f"loss {float(mean) / ranks:.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
