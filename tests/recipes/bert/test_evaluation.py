"""Evaluation by hand: two tokens, one rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ds_vrgd_recipes.bert import evaluation
from ds_vrgd_recipes.bert.evaluation import held_out_losses, unigram_log_probabilities


class FixedLossEngine(torch.nn.Module):
    """Answers every batch with the next of the given masked-LM means."""

    device = torch.device("cpu")

    def __init__(self, means: list[float]) -> None:
        super().__init__()
        self.means = iter(means)
        self.modes: list[bool] = []

    def forward(self, **batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.modes.append(self.training)
        return torch.tensor(next(self.means)), torch.tensor(0.7)


def test_counts_are_raised_by_one() -> None:
    # (3 + 1, 0 + 1, 1 + 1) of 7
    assert np.exp(unigram_log_probabilities(np.array([3, 0, 1]))) == pytest.approx([4 / 7, 1 / 7, 2 / 7])


def test_average_over_tokens_not_batches_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation.dist, "all_reduce", lambda sums: None)
    engine = FixedLossEngine([1.0, 4.0, 0.0])
    batches = [
        {"labels": torch.tensor([0, 0, 2])},  # three tokens of mean loss 1
        {"labels": torch.tensor([1])},  # one of loss 4
        {"labels": torch.tensor([], dtype=torch.int64)},  # padding of the last round
    ]
    loss, entropy = held_out_losses(engine, iter(batches), 3, np.array([3, 0, 1]))
    assert loss == pytest.approx((3 * 1 + 4) / 4)
    assert entropy == pytest.approx(-(2 * math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 4)
    assert engine.modes == [False] * 3
    assert engine.training
