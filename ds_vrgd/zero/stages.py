"""Statistics of a model whose layers are spread over the stages of a pipeline: every rank has those of all stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_vrgd.moments import SUM_DTYPE, Layer, LayerTable, ShardLayout
from ds_vrgd.optim import LayerStatistics


class StageStatistics:
    """Puts together what the stages have measured. Made by all of them: a collective.

    Args:
        layers: that this stage measures; of those that several stages hold, the first one's count.
        group: process group of this rank's pipeline, by ascending stage.
        device: where the ranks can talk to each other.
    """

    def __init__(self, layers: Iterable[Layer], group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        stages: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(stages, [(layer.name, layer.numel) for layer in layers], group=group)
        place: dict[str, int] = {}
        everything: list[Layer] = []
        self._mine: dict[str, int] = {}
        for stage, measured in enumerate(stages):
            for name, numel in measured:
                if name not in place:
                    place[name] = len(everything)
                    everything.append(Layer(name, numel))
                    if stage == torch.distributed.get_rank(group):
                        self._mine[name] = place[name]
        self._table = LayerTable([ShardLayout(tuple(everything), (), 0)], device)

    def merge(self, parts: Sequence[LayerStatistics]) -> list[LayerStatistics]:
        """Of all stages, where this one has measured ``parts``; a collective, which nobody waits for.

        A layer that no gradient came for has 0 everywhere.
        """
        columns = torch.zeros(5, len(self._table.names), dtype=SUM_DTYPE, device=self._device)
        for part in parts:
            chosen = [(row, self._mine[name]) for row, name in enumerate(part.table.names) if name in self._mine]
            assert part.clamped_low is not None
            assert part.clamped_high is not None
            measured = (part.mean_ratio, part.square, part.variance, part.clamped_low, part.clamped_high)
            rows, places = torch.tensor(chosen, dtype=torch.long, device=self._device).view(-1, 2).T
            columns[:, places] = torch.stack(measured).to(self._device)[:, rows]
        torch.distributed.all_reduce(columns, group=self._group)
        ratio, square, variance, low, high = columns
        return [LayerStatistics(self._table, parts[-1].k, ratio, square, variance, low, high)]
