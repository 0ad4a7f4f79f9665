"""The network: transformers' BertForPreTraining, with its loss at the masked positions only."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import AutoModelForPreTraining, BertConfig

from ds_vrgd_recipes.bert.attention import PACKED
from ds_vrgd_recipes.bert.runfile import ModelSection

_VOCABULARY_MULTIPLE = 8  # matrix units work on tiles; rows beyond the vocabulary are never used


def bert_config(model: ModelSection, pieces: int) -> BertConfig:
    """Return the configuration for a vocabulary of ``pieces``; the embedding is padded to a multiple of 8 rows."""
    vocab_size = -(-pieces // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return BertConfig(vocab_size=vocab_size, **model.model_dump())


class PretrainingModel(torch.nn.Module):
    """BERT with its two pre-training losses, on packed batches.

    No layer sees padding, and the vocabulary logits are computed at the masked positions alone. The weights, and their
    names, are those of ``transformers.BertForPreTraining``.

    Args:
        activation_checkpointing: keep only each layer's input for the backward pass.
    """

    def __init__(self, config: BertConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.network = AutoModelForPreTraining.from_config(config, attn_implementation=PACKED)
        if activation_checkpointing:
            # Not reentrant: a weight's gradient then comes whole, once per micro-batch.
            self.network.gradient_checkpointing_enable({"use_reentrant": False})
        self._summed_loss = summed_loss

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor,
        masked_positions: torch.Tensor,
        labels: torch.Tensor,
        next_sentence_label: torch.Tensor,
        longest: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of a batch; shapes as in ``packing.pack``.

        Args:
            longest: at least as many tokens as the longest example has.

        Returns:
            (masked_lm, next_sentence): means over masked tokens (0 without one) and over sequences; fp32 nats.
        """
        bert = self.network.bert
        embedded = bert.embeddings(input_ids[None], token_type_ids[None], position_ids[None])
        encoded = bert.encoder(embedded, starts=starts, longest=longest).last_hidden_state.squeeze(0)
        pooled = bert.pooler(encoded[starts[:-1]].unsqueeze(1))
        logits, relationship = self.network.cls(encoded[masked_positions], pooled)
        masked_lm = self._summed_loss(logits, labels) / max(len(labels), 1)
        return masked_lm, functional.cross_entropy(relationship.float(), next_sentence_label)

    def compile_layers(self) -> None:
        """Compile embeddings, encoder layers, head and loss, each once, for any number of tokens.

        Names of weights stay. The first batch and the first evaluation take the time. The loss becomes one kernel in
        each direction, and the logits are never stored in fp32.
        """
        bert = self.network.bert
        for module in (bert.embeddings, *bert.encoder.layer, self.network.cls):
            module.compile(dynamic=True)
        self._summed_loss = torch.compile(summed_loss, dynamic=True)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of ``(m, vocabulary)`` logits in any dtype, summed over m labels in fp32; nats."""
    return functional.cross_entropy(logits.float(), labels, reduction="sum")
