"""Optimizers of ds_vrgd in torchtitan's container, and a byte-level GPT-2 trained with it in one process.

python examples/torchtitan_optimizer.py

In a torchtitan job, give the trainer's config this optimizer (docs/FRAMEWORKS.md):

    VROptimizers.Config(param_groups=[
        ParamGroupConfig(pattern=".*", optimizer_name="VRLAMB", optimizer_kwargs={"lr": 4e-3, "weight_decay": 0.01})
    ])
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from text import VOCABULARY, blocks, unigram_entropy
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from transformers import GPT2Config, GPT2LMHeadModel

import ds_vrgd

STEPS, ACCUMULATION, BATCH = 40, 8, 16


class VROptimizers(OptimizersContainer):
    """torchtitan's container: a name in ``param_groups`` is that of a class of ds_vrgd."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """torchtitan's own; ``implementation`` is not used."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Any:
        return getattr(ds_vrgd, name)

    @staticmethod
    def _build_impl_kwargs(config: OptimizersContainer.Config) -> dict[str, Any]:
        return {}  # fused and foreach are torch's own arguments

    def __init__(self, config: OptimizersContainer.Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        if len(self.optimizers) != len(model_parts):
            raise ValueError("param_groups name several optimizers; use one name, with arguments for each pattern")
        for part, optimizer in zip(model_parts, self.optimizers, strict=True):
            if isinstance(part, FSDPModule):  # in one process torchtitan shards nothing
                ds_vrgd.attach(part, optimizer)


def main() -> None:
    """Train for 40 steps of 128 blocks, and print what the optimizer measured."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=64, n_layer=2, n_head=2))
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="VRLAMB", optimizer_kwargs={"lr": 2e-2, "weight_decay": 0.01, "gamma": 0.1}
    )
    optimizers = VROptimizers.Config(param_groups=[group]).build(model_parts=[model])
    losses: deque[float] = deque(maxlen=ACCUMULATION)
    text, order = blocks(64), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for batch in text[torch.randint(len(text), (ACCUMULATION, BATCH), generator=order)]:
            loss = model(input_ids=batch, labels=batch).loss / ACCUMULATION
            loss.backward()
            losses.append(float(loss.detach()) * ACCUMULATION)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
    stats = ds_vrgd.gsnr_stats(optimizers.optimizers[0])
    print(f"k = {stats.k}, mean GSNR over the layers {stats.means().mean_ratio:.3f}")
    print(f"loss {sum(losses) / ACCUMULATION:.3f} (byte frequencies alone: {unigram_entropy():.3f})")


if __name__ == "__main__":
    main()
