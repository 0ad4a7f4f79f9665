"""The model that the doctor trains."""

from __future__ import annotations

import pytest
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
    assert int(max(batches(step, index)[0].max() for step in range(9) for index in range(9))) < VOCABULARY - 20


def test_model_and_batches_are_the_same_on_every_rank() -> None:
    (one, batches), (other, again) = load_model(None, 4), load_model(None, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(batches(2, 3)[0], again(2, 3)[0])
    assert not torch.equal(batches(2, 3)[0], batches(2, 4)[0])


def test_branch_is_used_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch is always used in the first step, then not in the first micro-batch, then never."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model, batches = load_model(None, 4)
    used = [[batches(step, index)[1] for index in range(6)] for step in range(3)]
    assert used == [[True] * 6, [False] * 2 + [True] * 4, [False] * 6]
    with_it, without = chunk_gradients(model, [batches(1, 2), batches(1, 1)], 1.0)
    assert set(with_it) - set(without) == {"branch.weight", "branch.bias"}


@pytest.mark.parametrize("named", ["my_module", "my_module:", ":make"])
def test_a_model_without_module_or_function_is_an_error(named: str) -> None:
    with pytest.raises(ValueError, match=rf"--model {named}: give module:function"):
        load_model(named, 4)
