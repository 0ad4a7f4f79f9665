"""Batches without padding: the tokens of all examples end to end, and the start of each example."""

from __future__ import annotations

import torch
from torch.nn import functional

from ds_vrgd_recipes.bert.examples import IGNORED_LABEL, Batch


def pack(batch: Batch) -> Batch:
    """Leave out padding, and positions without a label.

    Batches are packed on the CPU, where they are made: finding the real tokens on a GPU would make the host wait.

    Args:
        batch: as ``examples.ExampleBuilder.batch`` makes it, of n examples with T real tokens, m of them masked.

    Returns:
        int64 tensors, in the order of the examples: ``input_ids``, ``token_type_ids``, ``position_ids`` ``(T,)``;
        ``masked_positions`` (in those) and ``labels`` ``(m,)``; ``next_sentence_label`` ``(n,)``. And
        ``starts`` ``(n + 1,)``, int32: example i is tokens ``starts[i]`` to ``starts[i + 1]``.
    """
    real = batch["attention_mask"].bool()
    labels = batch["labels"][real]
    masked = (labels != IGNORED_LABEL).nonzero().squeeze(1)
    return {
        "input_ids": batch["input_ids"][real],
        "token_type_ids": batch["token_type_ids"][real],
        "position_ids": torch.arange(real.shape[1]).expand_as(real)[real],
        "starts": functional.pad(real.sum(1).cumsum(0), (1, 0)).int(),
        "masked_positions": masked,
        "labels": labels[masked],
        "next_sentence_label": batch["next_sentence_label"],
    }
