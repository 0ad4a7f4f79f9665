"""AUC and log loss on the test set, and what a model that knows the click rate alone would lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ds_vrgd.clicks.auc import auc
from ds_vrgd.clicks.prepared import Batch


@dataclass(frozen=True)
class Scores:
    """Of one model on the test set.

    Attributes:
        auc: area under the ROC curve.
        loss: mean cross-entropy, nats.
        base_loss: that of the best constant, the entropy of the test set's click rate.
    """

    auc: float
    loss: float
    base_loss: float


def score(logits: Tensor, labels: Tensor) -> Scores:
    """Measure predictions, [rows] each."""
    rate = labels.double().mean()
    base = -(rate * rate.log() + (1 - rate) * (1 - rate).log())
    loss = binary_cross_entropy_with_logits(logits.double(), labels.double())
    return Scores(auc(logits, labels), loss.item(), base.item())


def held_out_scores(engine: Any, batches: Iterator[tuple[Tensor, int]]) -> Scores:
    """Evaluate this rank's batches, and measure those of all ranks together. Collective.

    Args:
        engine: DeepSpeed engine around a DLRM.
        batches: records and how many of them count; the same number on every rank.
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
