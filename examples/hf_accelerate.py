"""A loop with Accelerate and VRAdamW: under DeepSpeed ZeRO-2 on GPUs, under DDP on a CPU.

deepspeed --num_gpus 2 examples/hf_accelerate.py       (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)

With `accelerate launch`, leave `deepspeed_plugin` out: the file of `accelerate config` replaces it.
"""

from __future__ import annotations

import itertools
from collections import deque

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed
from text import VOCABULARY, blocks, unigram_entropy
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ds_vrgd

STEPS, ACCUMULATION, BATCH = 40, 4, 16


def main() -> None:
    """Train for 40 steps of 64 blocks per rank, and print what the optimizer measured."""
    set_seed(0)
    on_gpus = torch.cuda.is_available()  # Accelerate uses DeepSpeed only with GPUs
    accelerator = Accelerator(
        cpu=not on_gpus,
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=2) if on_gpus else None,
        gradient_accumulation_steps=ACCUMULATION,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    optimizer = ds_vrgd.VRAdamW(model.named_parameters(), lr=5e-3, weight_decay=0.01, gamma=0.1)
    data = DataLoader(blocks(64), batch_size=BATCH, shuffle=True, drop_last=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    losses: deque[torch.Tensor] = deque(maxlen=ACCUMULATION)  # of the last step: one micro-batch alone is noisy
    epochs = itertools.chain.from_iterable(itertools.repeat(data))
    for batch in itertools.islice(epochs, STEPS * ACCUMULATION):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            losses.append(loss.detach())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    mean = accelerator.reduce(torch.stack([*losses]).mean(), "mean")
    stats = ds_vrgd.gsnr_stats(optimizer)
    if accelerator.is_main_process:
        print(f"k = {stats.k}, mean GSNR over the layers {stats.means().mean_ratio:.3f}")
        print(f"loss {mean:.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    accelerator.end_training()


if __name__ == "__main__":
    main()
