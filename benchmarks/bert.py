"""The networks that are trained, their batches and their shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

SEQUENCE = 128
MASKED = 0.15
IGNORED = -100


@dataclass(frozen=True)
class Network:
    """A BERT.

    Attributes:
        micro_batch: sequences of one backward pass on one rank, unless the command says otherwise.
        shape: what differs from ``transformers.BertConfig``'s defaults, which are BERT-base.
    """

    micro_batch: int
    shape: dict[str, int] = field(default_factory=dict)

    def config(self) -> Any:
        """Return its configuration: the attention of ``scaled_dot_product_attention``, dropout as BERT has it."""
        # Rows beyond the vocabulary pad the embedding to tiles of the matrix units.
        return BertConfig(**({"vocab_size": 30528} | self.shape), attn_implementation="sdpa")

    def build(self, device: torch.device) -> torch.nn.Module:
        """Return the network in fp32 with random weights, the same on every rank."""
        torch.manual_seed(0)
        with device:
            model: torch.nn.Module = BertForPreTraining(self.config())
        return model.train()

    def batches(self, count: int, micro_batch: int, rank: int, device: torch.device) -> list[dict[str, Tensor]]:
        """Return ``count`` micro-batches of random tokens without padding, which need no attention mask."""
        config = self.config()
        length = min(SEQUENCE, config.max_position_embeddings)
        generator = torch.Generator().manual_seed(1 + rank)
        batches = []
        for _ in range(count):
            ids = torch.randint(config.vocab_size, (micro_batch, length), generator=generator)
            masked = torch.rand(ids.shape, generator=generator) < MASKED
            following = torch.randint(2, (micro_batch,), generator=generator)
            batch = {
                "input_ids": ids,
                "labels": ids.where(masked, IGNORED),
                "next_sentence_label": following,
            }
            batches.append({name: tensor.to(device) for name, tensor in batch.items()})
        return batches

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return every parameter and its name, in the model's order; without memory."""
        with torch.device("meta"):
            return list(BertForPreTraining(self.config()).named_parameters())


NETWORKS = {
    "large": Network(
        128, {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    ),
    "base": Network(256),
    # 2.5 billion parameters.
    "xl": Network(
        32, {"hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 10240}
    ),
    # So small that a CPU shows in a minute that everything runs; its times mean nothing.
    "tiny": Network(
        2,
        {
            "vocab_size": 128,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
        },
    ),
}
