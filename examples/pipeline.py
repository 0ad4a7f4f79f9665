"""A byte-level model in two pipeline stages whose first and last layer share one weight, with VRLAMB under ZeRO-1.

More ranks add data parallelism.

deepspeed --num_gpus 2 examples/pipeline.py     (on a CPU: DS_ACCELERATOR=cpu LOCAL_SIZE=2 in front)
"""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from text import VOCABULARY, blocks, unigram_entropy
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op

leave_out_shared_memory_op()  # on a CPU, compiling it takes a minute

STEPS, ACCUMULATION, BATCH, LENGTH, WIDTH = 40, 8, 8, 64, 64

DEEPSPEED = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "VRLAMB", "params": {"lr": 4e-2, "weight_decay": 0.01, "gamma": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": STEPS, "warmup_max_lr": 4e-2, "warmup_num_steps": 5, "warmup_type": "linear"},
    },
    "steps_per_print": 10**9,
}


class Causal(nn.TransformerEncoderLayer):
    """A transformer layer that attends to earlier bytes only."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Map ``(batch, LENGTH, WIDTH)`` to the same shape."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return super().forward(x, src_mask=mask, is_causal=True)


def logits(embedding: nn.Embedding, x: Tensor) -> Tensor:
    """Apply the shared weight as the output layer."""
    return nn.functional.linear(x, embedding.weight) / WIDTH**0.5


def loss_of(scores: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def batches(text: Tensor, replicas: int, replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this pipeline's micro-batches, without end: inputs for the first stage, labels for the last."""
    order = torch.Generator().manual_seed(1)
    while True:
        block = text[torch.randint(len(text), (replicas, BATCH), generator=order)[replica]]
        yield block[:, :-1], block[:, 1:]


def main() -> None:
    """Train for 40 steps of 64 blocks per pipeline, and print what the optimizer measured."""
    deepspeed.init_distributed()
    layers = [
        TiedLayerSpec("bytes", nn.Embedding, VOCABULARY, WIDTH),
        *(LayerSpec(Causal) for _ in range(2)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("bytes", nn.Embedding, VOCABULARY, WIDTH, forward_fn=logits),
    ]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_of, partition_method="uniform", seed_layers=True)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=DEEPSPEED)
    grid = engine.grid
    data = batches(blocks(LENGTH + 1), grid.get_data_parallel_world_size(), grid.get_data_parallel_rank())
    for _ in range(STEPS):
        loss = engine.train_batch(data)
    stats = ds_vrgd.gsnr_stats(engine)  # of the layers of both stages, on every rank
    if torch.distributed.get_rank() == 0:
        mine = sum(1 for _ in model.parameters())
        print(f"k = {stats.k}; {len(stats.layers)} layers, of which this stage holds {mine}")
        print(f"loss {loss.item():.3f} (byte frequencies alone: {unigram_entropy():.3f})")
    torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running


if __name__ == "__main__":
    main()
