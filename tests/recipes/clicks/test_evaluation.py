"""The exact AUC against its definition, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from ds_vrgd_recipes.clicks.evaluation import auc


def by_pairs(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Fraction of (1, 0) pairs in the right order, ties a half: what AUC is."""
    difference = scores[labels == 1][:, None] - scores[labels == 0]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


@pytest.mark.parametrize("distinct", [2, 7, 10_000])
def test_it_is_the_fraction_of_pairs_in_order(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randint(distinct, (500,), generator=generator).float()
    labels = (torch.rand(500, generator=generator) < 0.3).float()
    assert auc(scores, labels) == pytest.approx(by_pairs(scores, labels), abs=1e-12)


def test_known_values() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    # the example of scikit-learn's roc_auc_score: one of four pairs is in the wrong order
    assert auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), labels) == 0.75
    assert auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), labels) == 1.0
    assert auc(torch.zeros(4), labels) == 0.5
    assert math.isnan(auc(torch.tensor([0.0, math.nan, 1.0, 2.0]), labels))


def test_it_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5000, generator=generator).round(decimals=2)
    labels = (torch.rand(5000, generator=generator) < 0.1).float()
    assert auc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels.numpy(), scores.numpy()), abs=1e-12)


def test_one_label_has_no_area() -> None:
    with pytest.raises(ValueError, match="of 3 labels 0 are 1"):
        auc(torch.zeros(3), torch.zeros(3))
