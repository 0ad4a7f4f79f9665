"""A byte-level Llama whose sequences are cut over two ranks (DeepSpeed Ulysses), with VRLAMB under ZeRO-2.

More ranks add data parallelism.

deepspeed --num_gpus 2 examples/sequence_parallel.py     (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)
"""

from __future__ import annotations

from collections import deque

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from text import VOCABULARY, blocks, unigram_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

STEPS, ACCUMULATION, BATCH, LENGTH, SHARED = 40, 8, 8, 64, 2

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "VRLAMB", "params": {"lr": 4e-2, "weight_decay": 0.01, "gamma": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_max_lr": 4e-2, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
    "steps_per_print": 10**9,
}


def main() -> None:
    """Train for 40 steps of 64 blocks per sequence group, and print what the optimizer measured."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=SHARED, micro_batch_size=BATCH
    )
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED, mpu=mpu)
    replica, part = divmod(torch.distributed.get_rank(), SHARED)  # consecutive ranks share their samples
    replicas = torch.distributed.get_world_size() // SHARED
    places = torch.arange(LENGTH).chunk(SHARED)[part].to(engine.device)
    text = blocks(LENGTH + 1)
    order = torch.Generator().manual_seed(1)
    losses: deque[torch.Tensor] = deque(maxlen=ACCUMULATION)  # of the last step: one micro-batch alone is noisy
    for _ in range(STEPS):
        chosen = torch.randint(len(text), (ACCUMULATION, replicas, BATCH), generator=order)[:, replica]
        for batch in text[chosen].to(engine.device):
            ids, targets = batch[:, places], batch[:, places + 1]
            logits = engine(input_ids=ids, position_ids=places.expand(BATCH, -1), use_cache=False).logits
            # This rank's share of the mean over the whole sequences: DeepSpeed adds the shares up.
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / SHARED
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    total = torch.stack([*losses]).mean()
    torch.distributed.all_reduce(total, group=mpu.get_sequence_parallel_group())
    stats = ds_vrgd.gsnr_stats(engine)
    if torch.distributed.get_rank() == 0:
        print(f"k = {stats.k}: {SHARED} ranks share each of them")
        print(f"loss {total.item():.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
