"""DLRM against its definition, row by row in float64, and the zero gradients of rows that no example touches."""

from __future__ import annotations

import torch

import ds_vrgd
from ds_vrgd_recipes.clicks.model import DLRM

SIZES = [5, 3, *[4] * 24]


def tiny() -> DLRM:
    torch.manual_seed(0)
    return DLRM(SIZES, embedding_dim=3, bottom_mlp=[6, 3], top_mlp=[8, 4])


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    categories = torch.stack([torch.randint(size, (rows,)) for size in SIZES], dim=1).int()
    return torch.rand(rows, 13, dtype=torch.float64), categories


def test_forward_is_the_papers() -> None:
    """Naumov et al. 2019, section 2: all pairs of the 27 vectors by dot product, beside the bottom MLP's output."""
    model = tiny().double()
    dense, categories = inputs(6)
    logits = model(dense, categories)
    weights = dict(model.named_parameters())

    def layer(vector: torch.Tensor, name: str) -> torch.Tensor:
        return weights[f"{name}.weight"] @ vector + weights[f"{name}.bias"]

    for row in range(6):
        bottom = layer(layer(dense[row], "bottom.0").relu(), "bottom.2").relu()
        vectors = [bottom, *(weights[f"tables.{n}.weight"][categories[row, n]] for n in range(26))]
        pairs = [vectors[i] @ vectors[j] for i in range(27) for j in range(i)]
        hidden = layer(torch.cat([bottom, torch.stack(pairs)]), "top.0.0").relu()
        hidden = layer(hidden, "top.0.2").relu()
        torch.testing.assert_close(logits[row], layer(hidden, "top.1")[0], rtol=1e-12, atol=0)


def test_in_bf16_logits_still_tell_rows_apart() -> None:
    """bf16 has 128 numbers between 1 and 2; 4,096 logits of it would share their values."""
    model = tiny().bfloat16()
    dense, categories = inputs(4096)
    logits = model(dense.float(), categories)
    assert logits.dtype == torch.float32
    assert len(logits.unique()) > 2000


def test_rows_that_no_chunk_touches_stay_and_the_others_move_as_with_sgd() -> None:
    """r of an untouched row is 0/0 = 0, raised to gamma, times a gradient of 0. All others have r in (0, 1]."""
    model = tiny()
    optimizer = ds_vrgd.VRSGD(model.parameters(), lr=0.5)
    before = model.tables[0].weight.detach().clone()
    dense, categories = inputs(16)
    categories[:, 0] = torch.arange(16).int() % 3  # rows 3 and 4 of the first table are never looked up
    for chunk in range(8):
        part = slice(2 * chunk, 2 * chunk + 2)
        loss = (model(dense[part].float(), categories[part]) - 1).square().mean()
        (loss / 8).backward()
    gradient = model.tables[0].weight.grad
    assert gradient is not None
    gradient = gradient.clone()
    optimizer.step()
    moved = before - model.tables[0].weight.detach()
    assert not gradient[3:].any()
    assert not moved[3:].any()
    ratio = moved[:3] / (0.5 * gradient[:3])
    assert ratio.min() >= 0.1 - 1e-4
    assert ratio.max() <= 1 + 1e-4
    # two of five rows are zero, so the others' mean of the normalised ratio is 5/3: the clamp brings most of it to 1
    assert ratio.mean() > 0.5
