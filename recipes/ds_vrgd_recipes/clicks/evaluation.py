"""AUC and log loss on the test set, and the loss of a model that knows only the click rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ds_vrgd_recipes.clicks.prepared import Batch


@dataclass(frozen=True)
class Scores:
    """The scores of one model on the test set.

    Attributes:
        auc: area under the ROC curve.
        loss: mean cross-entropy, nats.
        base_loss: loss of the best constant, the entropy of the test set's click rate.
    """

    auc: float
    loss: float
    base_loss: float


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the probability that a row with label 1 has a higher score than one with label 0; a tie counts half.

    Exact, by ranks (Mann and Whitney 1947), in n log n on the tensors' device. (torchmetrics' squashes the scores by a
    sigmoid first, in which large ones become ties: 4e-4 off where logits are of order 20.)

    Args:
        scores: [rows], of any scale.
        labels: 0 or 1, [rows].

    Returns:
        NaN where a score is NaN.

    Raises:
        ValueError: one of the labels does not occur, so the area is not defined.
    """
    positive = int((labels == 1).sum())
    negative = labels.numel() - positive
    if not positive or not negative:
        raise ValueError(f"of {labels.numel()} labels {positive} are 1: AUC needs both labels")
    if bool(scores.isnan().any()):
        return float("nan")
    ordered, order = scores.sort()
    _, ties = ordered.unique_consecutive(return_counts=True)
    ranks = ties.cumsum(0).double() - (ties - 1).double() / 2  # of equal scores the mean one, from 1
    rank_sum = float(ranks.repeat_interleave(ties)[labels[order] == 1].sum())
    return (rank_sum - positive * (positive + 1) / 2) / (positive * negative)


def score(logits: Tensor, labels: Tensor) -> Scores:
    """Measure predictions, [rows] each."""
    rate = labels.double().mean()
    base = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    loss = binary_cross_entropy_with_logits(logits.double(), labels.double())
    return Scores(auc(logits, labels), loss.item(), base.item())


def held_out_scores(engine: Any, batches: Iterator[tuple[Tensor, int]]) -> Scores:
    """Evaluate this rank's batches, and score those of all ranks together. Collective.

    Args:
        engine: a DeepSpeed engine around a DLRM.
        batches: records and how many of them count; as many batches on every rank.
    """
    logits, labels, counts = [], [], []
    engine.eval()
    with torch.no_grad():
        for records, real in batches:
            batch = Batch.of(records.to(engine.device))
            logits.append(engine(batch.dense, batch.categories))
            labels.append(batch.labels)
            counts.append(torch.arange(len(batch.labels), device=engine.device) < real)
    engine.train()
    own = torch.stack([torch.cat(logits), torch.cat(labels), torch.cat(counts).float()])
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own)
    all_logits, all_labels, real_rows = torch.cat(everyones, dim=1)
    return score(all_logits[real_rows == 1], all_labels[real_rows == 1])
