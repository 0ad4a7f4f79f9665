"""Area under the ROC curve, exact."""

from __future__ import annotations

from torch import Tensor


def auc(scores: Tensor, labels: Tensor) -> float:
    """Probability that a row with label 1 has a higher score than one with label 0; a tie counts half.

    By ranks (Mann and Whitney 1947): no thresholds, so nothing depends on how scores are binned. Sorting takes
    n log n, on the tensors' device.

    Args:
        scores: [rows], of any scale.
        labels: 0 or 1, [rows].

    Returns:
        NaN where a score is NaN.

    Raises:
        ValueError: a label is missing altogether, so the area is not defined.
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
