"""DLRM (Naumov et al. 2019): embeddings and a bottom MLP, their dot products, a top MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ds_vrgd.clicks.criteo import DENSE


class DLRM(nn.Module):
    """Click probability from dense features and categories.

    Each table is a parameter, and so a layer for GSNR. Its gradient is dense: every row, also those that no example of
    the chunk has touched, which are zero.

    Args:
        table_sizes: rows of each feature's embedding table.
        embedding_dim: columns of all tables.
        bottom_mlp: widths of the layers behind the dense features, ReLU after each; the last is ``embedding_dim``.
        top_mlp: widths of the layers behind the interaction, ReLU after each but the last, which has width 1 and is not
            among them.
    """

    def __init__(
        self, table_sizes: Sequence[int], embedding_dim: int, bottom_mlp: Sequence[int], top_mlp: Sequence[int]
    ) -> None:
        super().__init__()
        vectors = 1 + len(table_sizes)
        self.tables = nn.ModuleList(nn.Embedding(size, embedding_dim) for size in table_sizes)
        self.bottom = _mlp((DENSE, *bottom_mlp))
        self.top = nn.Sequential(
            _mlp((embedding_dim + vectors * (vectors - 1) // 2, *top_mlp)), _LastLayer(top_mlp[-1], 1)
        )
        self._pairs: Tensor
        self.register_buffer("_pairs", torch.tril_indices(vectors, vectors, offset=-1), persistent=False)
        self._initialize()

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits, [rows] fp32 or wider.

        Args:
            dense: [rows, 13]; cast to the dtype of the weights.
            categories: rows of the tables, [rows, 26] of any integer dtype.
        """
        bottom = self.bottom(dense.to(next(self.bottom.parameters()).dtype))
        # Columns in a row: each lookup reads its own without a stride.
        columns = categories.t().contiguous()
        embedded = (table(column) for table, column in zip(self.tables, columns, strict=True))
        vectors = torch.stack((bottom, *embedded), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self._pairs
        logits: Tensor = self.top(torch.cat((bottom, products[:, first, second]), dim=1))
        return logits.squeeze(1)

    @torch.no_grad()
    def _initialize(self) -> None:
        """As in the DLRM paper's own code: tables uniform in +-1/sqrt(rows), weights normal (Glorot), biases normal."""
        for layer in self.modules():
            if isinstance(layer, nn.Embedding):
                bound = 1 / math.sqrt(layer.num_embeddings)
                layer.weight.uniform_(-bound, bound)
            elif isinstance(layer, nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / (layer.in_features + layer.out_features)))
                layer.bias.normal_(0, math.sqrt(1 / layer.out_features))


class _LastLayer(nn.Linear):
    """In fp32 at least: with the 8 bits of bf16 many rows would have the same logit, and AUC lives on their order."""

    def forward(self, inputs: Tensor) -> Tensor:
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        return nn.functional.linear(inputs.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
