"""A byte-level GPT-2 with VRLAMB under ZeRO-3: weights and optimizer state in the CPU's memory, GSNR on the device.

deepspeed --num_gpus 2 examples/offload.py             (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)
"""

from __future__ import annotations

from collections import deque

import deepspeed
import torch
from text import VOCABULARY, blocks, unigram_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

STEPS, ACCUMULATION, BATCH = 40, 4, 8

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    # From the config no further key is needed; an optimizer from Python needs "zero_force_ds_cpu_optimizer": false.
    "optimizer": {"type": "VRLAMB", "params": {"lr": 4e-2, "weight_decay": 0.01, "gamma": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_max_lr": 4e-2, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train for 40 steps of 32 blocks per rank, and print where the state is and the loss."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    text, order = blocks(64), torch.Generator().manual_seed(1)
    losses: deque[torch.Tensor] = deque(maxlen=ACCUMULATION)  # of the last step: one micro-batch alone is noisy
    for _ in range(STEPS):
        chosen = torch.randint(len(text), (ACCUMULATION, ranks, BATCH), generator=order)[:, rank]
        for batch in text[chosen].to(engine.device):
            loss = engine(input_ids=batch, labels=batch).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    mean = torch.stack([*losses]).mean() / ranks
    torch.distributed.all_reduce(mean)
    state = [entry for entries in engine.basic_optimizer.state.values() for entry in entries.values()]
    if rank == 0:
        where = {entry.device.type for entry in state}
        print(f"k = {ds_vrgd.gsnr_stats(engine).k}; {sum(entry.nbytes for entry in state) / 1e6:.1f} MB on {where}")
        print(f"loss {mean.item():.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
