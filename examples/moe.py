"""A byte-level model with four experts, spread over two ranks (DeepSpeed's MoE), with VRLAMB under ZeRO-2.

More ranks add expert-data parallelism.

deepspeed --num_gpus 2 examples/moe.py                 (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)
"""

from __future__ import annotations

from collections import deque

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from text import VOCABULARY, blocks, unigram_entropy
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

STEPS, ACCUMULATION, BATCH, SEEN, WIDTH, EXPERTS, SPREAD = 60, 8, 8, 4, 64, 4, 2

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "VRLAMB", "params": {"lr": 2e-2, "weight_decay": 0.01, "gamma": 0.1}},
    "steps_per_print": 10**9,
}


class Bytes(nn.Module):
    """A model that predicts every byte of a block from the four before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(SEEN * WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=EXPERTS, ep_size=SPREAD, k=1, drop_tokens=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the loss of ``(batch, length)`` bytes, and the term that spreads the tokens over the experts."""
        windows = self.embedding(ids[:, :-1]).unfold(1, SEEN, 1).flatten(2)
        hidden = self.mix(windows).tanh()
        routed, balance, _ = self.experts(hidden)
        logits = self.head(hidden + routed)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, SEEN:].flatten())
        return torch.stack([loss, 0.01 * balance])


def main() -> None:
    """Train for 60 steps of 64 blocks per rank, and print what the optimizer measured."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Bytes()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED)
    text = blocks(64)
    order = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    recent: deque[Tensor] = deque(maxlen=ACCUMULATION)  # of the last step: one micro-batch alone is noisy
    for _ in range(STEPS):
        chosen = torch.randint(len(text), (ACCUMULATION, BATCH), generator=order)
        for batch in text[chosen].to(engine.device):
            losses = engine(batch)
            recent.append(losses[0].detach())
            engine.backward(losses.sum())
            engine.step()
    loss = torch.stack([*recent]).mean()
    torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
    stats = ds_vrgd.gsnr_stats(engine)
    if torch.distributed.get_rank() == 0:
        held = {
            name.split("deepspeed_experts.")[1].split(".")[0] for name in stats.layers if "deepspeed_experts" in name
        }
        print(f"k = {stats.k}; the first rank holds experts {', '.join(sorted(held))} of {EXPERTS}")
        mean = loss.item() / torch.distributed.get_world_size()
        print(f"loss {mean:.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
