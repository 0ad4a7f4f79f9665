"""Attention within each example of a packed batch, as an attention function of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

#: ``attn_implementation`` of a network whose layers are called with ``starts`` and ``longest``.
PACKED = "ds_vrgd_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    dropout: float,
    scaling: float,
    starts: Tensor,
    longest: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """Let every token attend to the tokens of its own example.

    On CUDA in half precision PyTorch's FlashAttention kernel reads the packed tokens as they are; elsewhere they are
    padded for :func:`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        module: a layer of transformers, unused.
        query, key, value: ``(1, heads, tokens, head size)``.
        attention_mask: None; nothing is hidden within an example.
        dropout: probability with which a weight is dropped.
        scaling: of the scores.
        starts: ``(examples + 1,)``, int32, see ``packing.pack``.
        longest: at least as many tokens as the longest example has.

    Returns:
        ``(1, tokens, heads, head size)``, and no weights.
    """
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        # scaled_dot_product_attention and torch.nn.attention.varlen call this, too; the latter has no dropout.
        out, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, dropout, False, False, scale=scaling
        )
    else:
        out = _padded_attention(query, key, value, starts, longest, dropout, scaling)
    return out.unsqueeze(0), None


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, dropout: float, scaling: float
) -> Tensor:
    """Attend through padding; all tensors are ``(tokens, heads, head size)``."""
    lengths = starts.diff()
    examples = len(lengths)
    example = torch.repeat_interleave(torch.arange(examples, device=lengths.device), lengths, output_size=len(query))
    place = example * longest + torch.arange(len(query), device=lengths.device) - starts[:-1][example]

    def pad(tensor: Tensor) -> Tensor:
        rows = tensor.new_zeros(examples * longest, *tensor.shape[1:]).index_copy(0, place, tensor)
        return rows.view(examples, longest, *tensor.shape[1:]).transpose(1, 2)

    real = torch.arange(longest, device=lengths.device) < lengths[:, None]
    out = functional.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), attn_mask=real[:, None, None, :], dropout_p=dropout, scale=scaling
    )
    return out.transpose(1, 2).flatten(0, 1)[place]


AttentionInterface.register(PACKED, packed_attention)
