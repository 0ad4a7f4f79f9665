"""The statistics of a pipeline, of which each stage measures its own layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_vrgd.moments import SUM_DTYPE, Layer, LayerTable, ShardLayout, gathered
from ds_vrgd.optim import LayerStatistics


class StageStatistics:
    """Merges the statistics that the stages have measured. Constructing it is a collective of all stages.

    Args:
        layers: those that this stage measures; a layer that several stages hold counts on the first of them.
        group: process group of this rank's pipeline, by ascending stage.
        device: where the ranks can communicate.
    """

    def __init__(self, layers: Iterable[Layer], group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        stages = gathered([(layer.name, layer.numel) for layer in layers], group)
        first: dict[str, tuple[int, int]] = {}  # the first stage of a layer, and its elements
        for stage, measured in enumerate(stages):
            for name, numel in measured:
                first.setdefault(name, (stage, numel))
        own = torch.distributed.get_rank(group)
        self._mine = {name: row for row, (name, (stage, _)) in enumerate(first.items()) if stage == own}
        layout = ShardLayout(tuple(Layer(name, numel) for name, (_, numel) in first.items()), (), 0)
        self._table = LayerTable([layout], device)

    def merge(self, parts: Sequence[LayerStatistics]) -> list[LayerStatistics]:
        """Return the statistics of all stages, given this stage's own. A collective.

        A layer without a gradient has 0 everywhere. The number of chunks is that of the stages that have measured
        anything; the result is empty where none has.
        """
        columns = torch.zeros(6, len(self._table.names) + 1, dtype=SUM_DTYPE, device=self._device)
        for part in parts:
            gamma = part.gamma.to(self._device)
            measured = (gamma, part.mean_ratio, part.square, part.variance, part.clamped_low, part.clamped_high)
            chosen = [(row, self._mine[name]) for row, name in enumerate(part.table.names) if name in self._mine]
            rows, targets = torch.tensor(chosen, dtype=torch.long, device=self._device).view(-1, 2).T
            columns[:, targets] = torch.stack(measured).to(columns)[:, rows]
            columns[:2, -1] = torch.tensor([part.k, 1], dtype=SUM_DTYPE)
        torch.distributed.all_reduce(columns, group=self._group)
        k, stages = (parts[-1].k, 1) if parts else columns[:2, -1].tolist()  # only who measured nothing waits for them
        return [LayerStatistics(self._table, round(k / stages), *columns[:, :-1])] if stages else []
