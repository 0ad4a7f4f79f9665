"""A byte-level GPT-2 with VRLAMB in Lightning's automatic optimization; GSNR in the log.

python examples/lightning_module.py                    (one process)
"""

from __future__ import annotations

import logging
from collections import deque

import lightning
import torch
from text import VOCABULARY, blocks, unigram_entropy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import ds_vrgd

STEPS, ACCUMULATION, BATCH = 40, 8, 16


class Bytes(lightning.LightningModule):
    """A small GPT-2 over bytes."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2)
        self.gpt = GPT2LMHeadModel(config)
        self.losses: deque[float] = deque(maxlen=ACCUMULATION)  # of a step: one micro-batch alone is noisy

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the loss of a micro-batch: its gradient is a chunk."""
        loss: Tensor = self.gpt(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_zero_grad(self, optimizer: ds_vrgd.VRLAMB) -> None:  # type: ignore[override]
        """Log what the last step has measured: nothing before the first, after one of a single chunk, with gamma=1."""
        if optimizer.layer_statistics:
            self.log("gsnr_mean_ratio", ds_vrgd.gsnr_stats(optimizer).means().mean_ratio)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer; the names of the parameters are those that gsnr_stats() reports."""
        return ds_vrgd.VRLAMB(self.named_parameters(), lr=2e-2, weight_decay=0.01, gamma=0.1)


def main() -> None:
    """Train for 40 steps of 128 blocks, and print what the optimizer measured."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(0, verbose=False)
    data = DataLoader(blocks(64), batch_size=BATCH, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION,
        limit_train_batches=len(data) // ACCUMULATION * ACCUMULATION,  # every window has all its chunks
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Bytes()
    trainer.fit(model, data)
    stats = ds_vrgd.gsnr_stats(trainer.optimizers[0])
    print(f"k = {stats.k}, mean GSNR over the layers {stats.means().mean_ratio:.3f}")
    print(f"loss {sum(model.losses) / ACCUMULATION:.3f} (byte frequencies alone: {unigram_entropy():.3f})")


if __name__ == "__main__":
    main()
