"""Data-parallel ranks of a node, where tensor-parallel ranks share it."""

from __future__ import annotations

import pytest
import torch

from ds_vrgd.engines.deepspeed import parallel


@pytest.mark.parametrize(
    ("ranks", "local", "wanted", "found"),
    [
        (range(0, 8, 2), 4, None, 2),
        (range(1, 8, 2), 4, None, 2),
        (range(0, 8, 4), 4, None, 1),
        (range(8), 4, None, 4),
        (range(0, 8, 2), 8, None, 4),
        (range(0, 8, 2), 3, None, 4),  # the nodes are not equal: one level
        ((0, 4, 1, 5), 4, None, 4),  # neighbours are not on one node
        (range(0, 8, 2), 4, 4, 4),
    ],
)
def test_nodes_are_counted_in_data_parallel_ranks(
    monkeypatch: pytest.MonkeyPatch, ranks: range, local: int, wanted: int | None, found: int
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_SIZE", str(local))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 8 if group is None else len(ranks))
    monkeypatch.setattr(parallel, "get_process_group_ranks", lambda group: list(ranks))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    assert parallel.ranks_per_node(wanted, torch.device("cpu"), "group") == found
