"""The network: transformers' BertForPreTraining, its loss on the masked positions only, its parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import BertConfig, BertForPreTraining

from ds_vrgd.bert.examples import IGNORED_LABEL
from ds_vrgd.bert.runfile import ModelSection

_VOCABULARY_MULTIPLE = 8  # matrix units work on tiles; rows beyond the vocabulary are never used


def bert_config(model: ModelSection, pieces: int) -> BertConfig:
    """Configuration for a vocabulary of ``pieces``, whose embedding is padded to a multiple of 8 rows."""
    vocab_size = -(-pieces // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return BertConfig(vocab_size=vocab_size, **model.model_dump())


class PretrainingModel(torch.nn.Module):
    """BERT with its two pre-training losses.

    The vocabulary logits, most of the work in a small model, are computed at the masked positions alone.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.network = BertForPreTraining(config)

    def forward(
        self,
        input_ids: torch.Tensor,
        token_type_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor,
        next_sentence_label: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of a batch; shapes as in ``examples.ExampleBuilder.batch``.

        Returns:
            (masked_lm, next_sentence): mean over masked tokens (0 when none is) and over sequences; fp32 nats.
        """
        encoded = self.network.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)
        masked = labels != IGNORED_LABEL
        logits, relationship = self.network.cls(encoded.last_hidden_state[masked], encoded.pooler_output)
        total = functional.cross_entropy(logits.float(), labels[masked], reduction="sum")
        masked_lm = total / masked.sum().clamp(min=1)
        return masked_lm, functional.cross_entropy(relationship.float(), next_sentence_label)


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, and vectors (biases, LayerNorm) without weight decay and without a trust ratio.

    What LAMB's BERT recipes leave out of both. ``adapt`` is a group option of ds_vrgd's optimizers; others ignore it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if _dimensions(parameter) > 1]},
        {
            "params": [parameter for parameter in trained if _dimensions(parameter) <= 1],
            "weight_decay": 0.0,
            "adapt": False,
        },
    ]


def _dimensions(parameter: torch.nn.Parameter) -> int:
    # Under ZeRO-3's zero.Init a parameter is an empty tensor that keeps its shape aside.
    return len(getattr(parameter, "ds_shape", parameter.shape))
