"""Parts of one chunk on several ranks: which rows belong together, and their sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_vrgd.moments import ReplicatedMoments, SequenceGroups
from tests.support.ranks import run_on_ranks

GROUPS = SequenceGroups(None, ((0, 2), (1, 3)))


def test_rows_are_those_of_the_ranks_that_share_samples() -> None:
    assert GROUPS.rows([0, 1, 2, 3]) == [(0, 2), (1, 3)]
    assert SequenceGroups(None, ((0, 1), (2, 3))).rows([2, 3]) == [(0, 1)]


def test_part_of_a_sequence_on_another_node_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"\[0, 2\].*multiple of the sequence-parallel size 2"):
        GROUPS.rows([0, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_parts_are_summed_before_they_are_rounded_again(dtype: torch.dtype) -> None:
    received = torch.tensor([[256.0, 1.0], [2.0, 2.0], [1.0, -1.0], [4.0, 0.5]], dtype=dtype)
    joined = GROUPS.join(received, GROUPS.rows(range(4)))
    assert joined.dtype == torch.promote_types(dtype, torch.float32)
    assert joined.tolist() == [[257.0, 0.0], [6.0, 2.5]]  # 257 is no number of bfloat16
    assert replace(GROUPS, divisor=2).join(received, [(0, 2)]).tolist() == [[128.5, 0.0]]


def gradient(rank: int, micro_batch: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * micro_batch + index)
    return torch.randn(5 + index, generator=generator, dtype=torch.float64)


def whole_copies(rank: int) -> list[float]:
    """Every rank lacks another gradient in every micro-batch, and gets the rest in another order."""
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    groups = SequenceGroups(pairs[rank // 2], ((0, 1), (2, 3)))
    params = [torch.zeros(5 + index, dtype=torch.float64) for index in range(4)]
    moments = ReplicatedMoments(params, torch.distributed.group.WORLD, sequences=groups)
    for micro_batch in range(2):
        for index in sorted(range(4), key=lambda index: (index + rank) % 4):
            if index != (rank + micro_batch) % 4:
                moments.add(params[index], gradient(rank, micro_batch, index))
        moments.end_micro_batch()
    assert moments.finish() == 4
    errors = []
    for index, param in enumerate(params):
        chunks = torch.zeros(4, 5 + index, dtype=torch.float64)
        for other in range(4):
            for micro_batch in range(2):
                if index != (other + micro_batch) % 4:
                    chunks[2 * (other // 2) + micro_batch] += gradient(other, micro_batch, index)
        found = moments.moments(param)
        errors.append(float((found.mean - chunks.mean(0)).abs().max()))
        errors.append(float((found.m2 - (chunks - chunks.mean(0)).square().sum(0)).abs().max()))
    return errors


def test_whole_copies_join_their_parts_whatever_each_rank_lacks() -> None:
    for errors in run_on_ranks(4, whole_copies):
        assert max(errors) < 1e-14
