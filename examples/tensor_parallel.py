"""A byte-level Llama cut over two ranks by DeepSpeed's AutoTP, with VRLAMB under ZeRO-2.

More ranks add data parallelism.

deepspeed --num_gpus 2 examples/tensor_parallel.py     (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)

With Megatron's model parallel unit, call deepspeed.initialize(mpu=...) and leave out the "tensor_parallel" section.
"""

from __future__ import annotations

from collections import deque

import deepspeed
import torch
from text import VOCABULARY, blocks, unigram_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

STEPS, ACCUMULATION, BATCH = 40, 8, 8

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 2},
    "tensor_parallel": {"autotp_size": 2},
    "optimizer": {"type": "VRLAMB", "params": {"lr": 4e-2, "weight_decay": 0.01, "gamma": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_max_lr": 4e-2, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train for 40 steps of 64 blocks per data-parallel rank, and print what the optimizer measured."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        )
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED)
    # Tensor-parallel ranks work on the same batch; each data-parallel rank has its own.
    replicas, replica = engine.dp_world_size, engine.mpu.get_data_parallel_rank()
    text = blocks(64)
    order = torch.Generator().manual_seed(1)
    losses: deque[torch.Tensor] = deque(maxlen=ACCUMULATION)  # of the last step: one micro-batch alone is noisy
    for _ in range(STEPS):
        chosen = torch.randint(len(text), (ACCUMULATION, replicas, BATCH), generator=order)[:, replica]
        for batch in text[chosen].to(engine.device):
            loss = engine(input_ids=batch, labels=batch).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    stats = ds_vrgd.gsnr_stats(engine)
    if torch.distributed.get_rank() == 0:
        split = [name for name, param in engine.module.named_parameters() if hasattr(param, "tensor_model_parallel")]
        print(f"k = {stats.k}; {len(split)} of {len(stats.layers)} layers are cut over two ranks")
        print(f"loss {torch.stack([*losses]).mean():.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
