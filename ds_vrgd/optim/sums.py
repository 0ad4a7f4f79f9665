"""Sums over whole layers, wherever their elements are, and the statistics that they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ds_vrgd.moments import LayerTable
from ds_vrgd.optim.shards import LayerStatistics, Observer, Shard

# Sets of shards whose layers are kept side by side; a model that leaves out other parameters in each step has many.
MOST_TABLES = 64


class LayerSums:
    """A part of every optimizer here: the layers of its shards, summed over the ranks that share them."""

    _tables: dict[tuple[int, ...], LayerTable]
    _counts: list[Tensor]
    _statistics: list[LayerStatistics]

    @property
    def observer(self) -> Observer:
        """Who provides layouts and moments."""
        raise NotImplementedError

    def table(self, shards: Sequence[Shard]) -> LayerTable:
        """The layers of ``shards``, side by side."""
        layouts = [self.observer.layout(shard.tensor) for shard in shards]
        key = tuple(id(layout) for layout in layouts)
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = LayerTable(layouts, shards[0].tensor.device)
        return self._tables[key]

    def sum_over_ranks(self, table: LayerTable | None, columns: Sequence[Tensor]) -> list[Tensor]:
        """``columns`` summed over the ranks that share layers, together with the counts that wait.

        Args:
            table: their layers; may be None where there are no columns.
            columns: ``(L,)`` each.
        """
        own = [(table, column) for column in columns] if table is not None else []
        waiting = [(self._statistics[-1].table, count) for count in self._counts]
        totals = self.observer.ranks.sum([*own, *waiting])
        if self._counts:
            self._statistics[-1].count(*totals[-2:])
            self._counts = []
        return totals[: len(columns)]

    def layer_norms(self, shards: Sequence[Shard], *tensors: Sequence[Tensor]) -> list[Tensor]:
        """2-norms over whole layers, in one all-reduce for all of them.

        Args:
            shards: those of this call, the same on every rank.
            tensors: sequences of one tensor a shard, of the shards' shapes.

        Returns:
            For each sequence ``(L,)`` in :data:`SUM_DTYPE`.
        """
        table = self.table(shards)
        columns = [table.sums([tensor.flatten() for tensor in sequence], 2) for sequence in tensors]
        return [total.sqrt() for total in self.sum_over_ranks(table, columns)]

    def merge_statistics(self, merge: Callable[[Sequence[LayerStatistics]], list[LayerStatistics]]) -> None:
        """Replace what the last step saw by what ``merge`` makes of it: that of other ranks, too."""
        self._statistics = merge(self._statistics)

    @property
    def layer_statistics(self) -> Sequence[LayerStatistics]:
        """What the last step saw, one entry for each of its calls; empty before the first, or with ``gamma=1``."""
        return self._statistics
