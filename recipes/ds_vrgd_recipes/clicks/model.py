"""DLRM (Naumov et al. 2019): embeddings and a bottom MLP, their dot products, a top MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ds_vrgd_recipes.clicks.criteo import DENSE


class DLRM(nn.Module):
    """The click probability from dense features and categories.

    Each table is a parameter, and so a layer for GSNR. Its gradient is dense: rows that no example of the chunk touches
    are zero.

    Args:
        table_sizes: rows of each feature's embedding table.
        embedding_dim: columns of all tables.
        bottom_mlp: widths of the layers after the dense features, with ReLU after each; the last is ``embedding_dim``.
        top_mlp: widths of the layers after the interaction, with ReLU after each. A last layer of width 1 is added.
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
        """Return logits, [rows] fp32 or wider.

        Args:
            dense: [rows, 13]; cast to the dtype of the weights.
            categories: rows of the tables, [rows, 26] of any integer dtype.
        """
        bottom = self.bottom(dense.to(next(self.bottom.parameters()).dtype))
        # Contiguous columns: each lookup reads its own without a stride.
        columns = categories.t().contiguous()
        embedded = (table(column) for table, column in zip(self.tables, columns, strict=True))
        vectors = torch.stack((bottom, *embedded), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self._pairs
        logits: Tensor = self.top(torch.cat((bottom, products[:, first, second]), dim=1))
        return logits.squeeze(1)

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialise as the paper's code: tables uniform in +-1/sqrt(rows), weights normal (Glorot), biases normal."""
        for layer in self.modules():
            if isinstance(layer, nn.Embedding):
                bound = 1 / math.sqrt(layer.num_embeddings)
                layer.weight.uniform_(-bound, bound)
            elif isinstance(layer, nn.Linear):
                layer.weight.normal_(0, math.sqrt(2 / (layer.in_features + layer.out_features)))
                layer.bias.normal_(0, math.sqrt(1 / layer.out_features))


class _LastLayer(nn.Linear):
    """A layer in fp32 or wider: in the 8 bits of bf16 many rows would have one logit, and AUC needs their order."""

    def forward(self, inputs: Tensor) -> Tensor:
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        return nn.functional.linear(inputs.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)
