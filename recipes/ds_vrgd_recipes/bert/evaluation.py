"""Held-out evaluation: the masked-LM loss, and the loss that a model without context could reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed.comm as dist
import numpy as np
import numpy.typing as npt
import torch

from ds_vrgd_recipes.bert.examples import Batch


def held_out_losses(
    engine: Any, batches: Iterator[Batch], longest: int, unigram_counts: npt.NDArray[np.int64]
) -> tuple[float, float]:
    """Evaluate this rank's batches and average over the masked tokens of all ranks. Collective.

    Args:
        engine: a DeepSpeed engine around a PretrainingModel.
        batches: packed; as many on every rank.
        longest: most tokens of an example.
        unigram_counts: occurrences of each token id in the training split.

    Returns:
        (masked-LM loss, unigram entropy), nats per masked token. The entropy is the cross-entropy of the same tokens
        under ``unigram_log_probabilities``: the loss of the best prediction that ignores the context.
    """
    log_probabilities = unigram_log_probabilities(unigram_counts)
    loss, unigram, tokens = 0.0, 0.0, 0
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            masked = batch["labels"]
            on_device = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            masked_lm, _ = engine(**on_device, longest=longest)
            loss += masked_lm.item() * len(masked)
            unigram -= float(log_probabilities[masked.numpy()].sum())
            tokens += len(masked)
    engine.train()
    sums = torch.tensor([loss, unigram, tokens], dtype=torch.float64, device=engine.device)
    dist.all_reduce(sums)
    loss, unigram, total = sums.tolist()
    return loss / total, unigram / total


def unigram_log_probabilities(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the logarithm of each token's frequency, [vocabulary]; every count is raised by one: none is zero."""
    raised = counts.astype(np.float64) + 1.0
    return np.asarray(np.log(raised / raised.sum()))
