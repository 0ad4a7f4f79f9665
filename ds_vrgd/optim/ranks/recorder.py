"""The work of an optimizer's argument ``watch``: a report of every step, and a line or an error for what it shows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_vrgd.moments.compare import Comparison, RankSums
from ds_vrgd.moments.streams import on_host
from ds_vrgd.optim import world
from ds_vrgd.optim.observer import BadGradient, Observer
from ds_vrgd.optim.ranks.report import RankReport
from ds_vrgd.optim.ranks.watch import RankEvent, RankWatch


class RankError(RuntimeError):
    """A rank whose gradient is not like the others', with ``watch="error"``.

    Attributes:
        events: what was seen.
    """

    def __init__(self, optimizer: str, events: Sequence[RankEvent]) -> None:
        super().__init__(f"{optimizer}: {'; '.join(map(str, events))}. See docs/RANKS.md for what to do")
        self.events = tuple(events)


class RankRecorder:
    """The report of every step of an optimizer, and what its argument ``watch`` has done about it.

    The sums are on their way to the CPU while the weights are updated, and are judged after that. ``policy`` is the
    argument ``watch``.

    Attributes:
        report: of the last step; None before the first.
    """

    def __init__(self, optimizer: str, policy: str | Callable[[RankEvent], None] | None) -> None:
        self.report: RankReport | None = None
        self._news: list[RankEvent] = []
        self._optimizer, self._policy = optimizer, policy
        self._ranks, self._nodes = RankWatch(), RankWatch()
        self._window, self._is_first, self._steps = -1, False, 0
        self._pending: list[tuple[Comparison, Callable[[], Sequence[Tensor]], float]] = []

    def take(self, observer: Observer) -> None:
        """Sum what was compared in a window, once. A collective of the ranks that are compared.

        Raises:
            ValueError: no rank sees the gradients of others.
        """
        comparison = observer.comparison
        if comparison is None:
            raise ValueError(
                f"{self._optimizer}: watch={self._policy!r} compares the ranks' gradients, and without an engine no "
                "rank sees those of others. Use DeepSpeed ZeRO stage 1, 2 or 3, FSDP2 with ds_vrgd.attach, or "
                "Megatron-Core; or leave watch out"
            )
        if self._window == observer.window:
            return
        k = observer.finish()
        if self._window < 0:
            self._begin(comparison)
        self._window, self._steps = observer.window, self._steps + 1
        self._pending.clear()  # of a step that raised an error
        if not k:
            return
        parts = k // comparison.at_once
        unit = observer.unit(k) ** 2 / parts
        device = observer.ranks.device or comparison.device or torch.device("cpu")
        self._pending.append((comparison, on_host(comparison.totals(device)), unit))
        if (across := comparison.across) is not None:  # what travels between nodes is the sum of a window
            self._pending.append((across, on_host(across.totals(device)), unit / parts))

    def _begin(self, comparison: Comparison) -> None:
        """Report once what cannot be told; each group of ranks that are compared has a first one, which logs."""
        self._is_first = world.group() is None or torch.distributed.get_rank() == comparison.ranks[0]
        ranks, fewest = len(comparison.ranks), RankWatch.fewest
        if self._is_first and ranks < fewest:
            world.warn(
                f"{self._optimizer}: watch={self._policy!r} has {ranks} rank{'s' * (ranks > 1)} to compare, and of "
                f"fewer than {fewest} none can be said to be unlike the others. NaN, infinities and identical "
                "gradients are reported; see docs/RANKS.md."
            )

    def judge(self) -> None:
        """Look at the window that was taken last, and do what the optimizer's argument says.

        Raises:
            RankError: ``watch="error"``, and a rank is not like the others.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        reports = [
            RankReport.of_sums(self._steps - 1, compared.names, compared.ranks, RankSums(*sums()), unit)
            for compared, sums, unit in pending
        ]
        self.report = replace(reports[0], nodes=reports[1]) if len(reports) > 1 else reports[0]
        events = self._ranks.update(reports[0])
        if len(reports) > 1:
            events += [replace(event, of_node=True) for event in self._nodes.update(reports[1])]
        self._act(events)

    def take_bad(self, found: Sequence[BadGradient]) -> None:
        """Do the same for the gradients that are not finite, in a window that is left out before it was taken."""
        if self._pending:
            return
        self._steps += 1
        layers: dict[int, dict[str, None]] = {}
        for bad in found:
            layers.setdefault(bad.rank, {})[bad.layer] = None
        detail = "values are NaN or infinite"
        events = [
            RankEvent(self._steps - 1, rank, "nonfinite", tuple(names), 1.0, detail=detail)
            for rank, names in layers.items()
        ]
        self._act(self._ranks.tell(events))

    def news(self) -> list[RankEvent]:
        """Return the events since the last call."""
        news, self._news = self._news, []
        return news

    def _act(self, events: Sequence[RankEvent]) -> None:
        self._news += events
        if callable(self._policy):
            for event in events:
                self._policy(event)
        elif events and self._policy == "error":
            raise RankError(self._optimizer, events)
        elif self._is_first:
            for event in events:
                logging.getLogger("ds_vrgd").warning("%s: %s", self._optimizer, event)
