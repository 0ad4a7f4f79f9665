"""The model that the doctor trains."""

from __future__ import annotations

import torch

from ds_vrgd.doctor.chunks import chunk_gradients, norm_of
from ds_vrgd.doctor.model import VOCABULARY, load_model


def test_tiny_transformer_has_what_breaks_sharded_statistics() -> None:
    model, batches = load_model(None, 4)
    assert model.head.weight is model.tokens.weight
    assert sum(param.numel() for param in model.parameters()) % 2 == 1
    chunks = chunk_gradients(model, [batches(0, index) for index in range(4)], 1.0)
    mean = {name: torch.stack([chunk[name] for chunk in chunks]).mean(0) for name in chunks[0]}
    assert norm_of(list(mean.values())) > 1.0, "the usual clipping would have nothing to do"
    assert all(grad.abs().max() > 1e-4 for grad in mean.values()), "a gradient is nothing but rounding"
    assert int(max(batches(step, index).max() for step in range(9) for index in range(9))) < VOCABULARY - 20


def test_model_and_batches_are_the_same_on_every_rank() -> None:
    (one, batches), (other, again) = load_model(None, 4), load_model(None, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(batches(2, 3), again(2, 3))
    assert not torch.equal(batches(2, 3), batches(2, 4))
