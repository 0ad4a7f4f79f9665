"""A watch that names the rank that is not like the others, the layers that show it, and the kind of fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ds_vrgd.moments.compare import LEAST_SHARE
from ds_vrgd.optim.ranks.report import RankReport
from ds_vrgd.optim.ranks.series import FALSE_ALARMS, FAR, LEAST, TINY, WARMUP, Series, median_of_rows

#: The other ranks are quiet about a fault that was told for this many steps.
QUIET = 100

# A value is sudden this many robust standard deviations out; the largest deviation of an element, whose logarithm has
# an exponential tail; the largest share of one; and both of these together.
_SUDDEN, _SUDDEN_ELEMENT, _SUDDEN_SHARE, _TOGETHER = 30.0, 20.0, 14.0, 8.0
# An element stands out where its share does, and the norm of its layer is this far out; both that far beyond before.
_LOUD, _BOTH = 12.0, 1.25
# The share of an element explains a norm that is raised by no more than what it adds, within this part.
_EXPLAINS = 0.9
# A squared norm counts as at least this share of the ranks' median, and as zero below that one.
_LEAST_NORM, _ZERO = 1e-2, 1e-20
# A norm has a factor where it is this many robust standard deviations out in the mean over the steps.
_FACTOR = 2.0
# Two gradients whose squared distance is less than this share of that of their distances from the mean are the same.
_SAME = 1e-3
# The part of the layers in which the norm is off where the whole gradient is.
_MOST_LAYERS = 0.6
# Evidence that is on its way to its bound, by this part of it; the cosine with the last step's of the same batch.
_LIKELY, _REPEATED = 0.3, 0.5
# Decay of the running mean of a rank's deviations; rate of the running means that a fault is described by.
_MEMORY, _FAST = 0.9, 0.2
# The largest cosine that counts.
_MOST = 0.9999


@dataclass(frozen=True)
class RankEvent:
    """A rank whose gradient is not like those of the others.

    Attributes:
        step: number of the optimizer step that showed it, from 0 where the process began.
        rank: global rank.
        fault: "nonfinite", "identical", "repeated", "drifted", "zero", "scaled", "flipped", "element" or "wrong"
            (docs/RANKS.md).
        layers: the layers that show it, the clearest first; none for the gradient as a whole.
        confidence: 1 minus a bound on the number of false alarms like it in 10,000 steps; an order rather than a
            probability where the fault was sudden.
        peers: the other ranks with the same gradient, for "identical".
        detail: what was seen, in words.
        of_node: whether it is about the mean gradient of a node, whose first rank is ``rank``.
    """

    step: int
    rank: int
    fault: str
    layers: tuple[str, ...]
    confidence: float
    peers: tuple[int, ...] = ()
    detail: str = ""
    of_node: bool = False

    def __str__(self) -> str:
        """Return the event in one line."""
        shown = ", ".join(f"'{layer}'" for layer in self.layers[:3])
        more = f" and {len(self.layers) - 3} more" if len(self.layers) > 3 else ""
        where = f" in {shown}{more}" if self.layers else ""
        who = f"the node of rank {self.rank}" if self.of_node else f"rank {self.rank}"
        return f"step {self.step}, {who}: {self.fault}{where}: {self.detail} (confidence {self.confidence:.4f})"


class _Rows(NamedTuple):
    """The rows that are followed: one of each layer, and of the norms and cosines one of the whole gradient."""

    norm: Tensor  # (L + 1, ...), the whole gradient last
    cosine: Tensor  # the same
    peak: Tensor  # (L, ...), the largest deviation of an element
    share: Tensor  # (L, ...), the largest share of one
    again: Tensor  # (2, ...), cosines of the deviations with those of the last step, and with their running mean


class RankWatch:
    """Follows the reports of a training, and names ranks that are not like the others.

    ::

        watch = ds_vrgd.RankWatch()
        for batch in data:
            ...  # forward, backward, step
            for event in watch.update(ds_vrgd.rank_report(engine)):
                print(event)  # step 812, rank 5: scaled in 'head.weight': its norm is 0.50 of the others' there (...)

    It takes the data of the ranks to be drawn alike. NaN and identical gradients are named at once; what is far beyond
    everything before, in the first to the fourth step, after the first 20; what is a little off in every step, after
    ten to thirty, a sign in up to a hundred. With fewer than four ranks only NaN and identical gradients are reported.
    For 100 steps after a rank was named, only faults that need no statistics are reported of it.

    Attributes:
        fewest: ranks that can be compared: of three, one that differs cannot be told from two that do.
        events: all events so far.
        steps: number of reports counted.
    """

    fewest: ClassVar[int] = 4

    def __init__(self) -> None:
        self.events: list[RankEvent] = []
        self.steps = 0
        self._of: tuple[tuple[str, ...], tuple[int, ...]] | None = None
        self._told: dict[tuple[int, str], int] = {}
        self._out: dict[int, int] = {}

    def _begin(self, layers: int, ranks: int) -> None:
        self._layers = layers
        self._before: Tensor | None = None  # the ranks' deviations in the last step, and their running means
        self._compared = 0
        if ranks < self.fewest:
            return
        # Sides, tests, limit and number of rows, in the order of _Rows.
        both, large, small, many = [1, 1], [1, 0], [0, 1], 3 * layers
        kinds = [(both, many, _SUDDEN, layers), (both, 6, _SUDDEN, 1)]
        kinds += [(small, many, _SUDDEN, layers), (small, 6, _SUDDEN, 1)]
        kinds += [(large, 0, _SUDDEN_ELEMENT, layers), (large, 0, _SUDDEN_SHARE, layers), (large, 6, _SUDDEN, 2)]
        *columns, counts = (torch.tensor(column) for column in zip(*kinds, strict=True))
        sides, tests, limits = (column.repeat_interleave(counts, 0) for column in columns)
        self._series = Series(sides, tests, limits, ranks)
        pairs = ranks * (ranks - 1) // 2
        # Two batches may share a rare sample once: a pair is reported only where it lasts.
        self._pairs = Series(torch.tensor([small]), torch.tensor([1]), torch.tensor([math.inf]), pairs)
        self._means = torch.zeros(2, layers + 1, ranks, dtype=torch.double)
        self._again = torch.zeros(ranks, dtype=torch.double)
        self._has_been_zero = torch.zeros(layers, dtype=torch.bool)

    def _rows(self, rows: Tensor) -> _Rows:
        """Name the rows of ``(R, ...)``."""
        layers = self._layers
        return _Rows(*rows.split([layers + 1, layers + 1, layers, layers, 2]))

    def update(self, report: RankReport) -> list[RankEvent]:
        """Count the report of a step, and return what it shows.

        Args:
            report: of the step; with other layers or ranks than the last one, the statistics begin anew.
        """
        if self._of != (report.layers, report.ranks):
            self._of = report.layers, report.ranks
            self._begin(len(report.layers), len(report.ranks))
        self.steps += 1
        found = self._not_finite(report) or self._identical(report)
        if not found and len(report.ranks) >= self.fewest:
            found = self._compare(report)
        return self.tell(found)

    def tell(self, found: Sequence[RankEvent]) -> list[RankEvent]:
        """Keep those of some events that were not told before, and return them."""
        new = [event for event in found if self._is_new(event)]
        self.events += new
        return new

    def _is_new(self, event: RankEvent) -> bool:
        """Return whether an event is to be told, and remember that it was."""
        fault, ranks = event.fault if event.confidence == 1.0 else "", (event.rank, *event.peers)
        if any(self._told.get((rank, fault), -QUIET) > self.steps - QUIET for rank in ranks):
            return False
        for rank in ranks:
            self._told[rank, fault] = self._told[rank, ""] = self.steps
        if event.fault not in ("element", "nonfinite"):  # which pass, as a rule
            self._out[ranks[-1]] = self.steps
        return True

    # -- what needs no statistics -------------------------------------------------------------------------------------

    def _not_finite(self, report: RankReport) -> list[RankEvent]:
        found = []
        for column, rank in enumerate(report.ranks):
            counts = report.nonfinite[:, column]
            if int(counts.sum()):
                layers = tuple(report.layers[row] for row in counts.nonzero()[:, 0].tolist())
                detail = f"{int(counts.sum())} values are NaN, infinite or beyond 2^48"
                found.append(RankEvent(report.step, rank, "nonfinite", layers, 1.0, detail=detail))
        return found

    def _identical(self, report: RankReport) -> list[RankEvent]:
        """Return the groups of ranks whose gradients are the same in every layer, or nearly so in nearly all."""
        k = len(report.ranks)
        squares = report.distances.square(), report.norms.square()
        spread, size = (square[:, :, None] + square[:, None, :] for square in squares)
        live = size > 0.0
        # Beside a far larger gradient all small ones are equally far from the mean; and where the noise is small, all
        # gradients are near each other.
        same = (report.gaps.square() <= torch.maximum(_SAME * torch.minimum(spread, size), 1e-10 * size)) & live
        alike = (same.sum(0) >= 0.9 * live.sum(0)) & (live.sum(0) > 0)
        found, seen = [], set[int]()
        for first in range(k):
            peers = [other for other in range(first + 1, k) if alike[first, other] and other not in seen]
            if peers and first not in seen:
                seen |= {first, *peers}
                others = tuple(report.ranks[other] for other in peers)
                detail = f"the same gradient as rank {', '.join(map(str, others))}: the same data"
                found.append(RankEvent(report.step, report.ranks[first], "identical", (), 1.0, others, detail))
        return found

    # -- what is compared with the other ranks and with the past ------------------------------------------------------

    def _compare(self, report: RankReport) -> list[RankEvent]:
        """Count the step, and return the ranks that stand out."""
        layers, square = self._layers, report.norms.square()
        usual = square.median(1, keepdim=True).values
        live = usual[:, 0] > 0.0
        norms = 0.5 * (square / usual.clamp(min=TINY) + _LEAST_NORM).log()
        cosines = report.cosines.clamp(-_MOST, _MOST).atanh()  # whose spread depends less on their size
        # Where the others have no spread, as after a dead unit, a small element seems far out.
        most = 0.5 * math.sqrt((len(report.ranks) - 2) / LEAST_SHARE)
        measured = (report.deviations < most) | (report.elements == report.largest)
        deviations = torch.where(measured, report.deviations, 0.0)
        values = torch.stack([norms, cosines, (deviations + 1e-6).log(), (report.shares + 1e-9).log()])
        values = torch.where(live[:, None], values, 0.0)
        whole = (values[:2] - median_of_rows(values[:2].flatten(0, 1)).view(2, layers, 1))[:, live]
        whole = whole.median(1, keepdim=True).values if whole.shape[1] else values.new_zeros(2, 1, len(report.ranks))
        norms_and_cosines = torch.cat([values[:2], whole], 1).flatten(0, 1)
        rows = torch.cat([norms_and_cosines, values[2:].flatten(0, 1), self._directions(report, live)])
        active = torch.tensor([self._out.get(rank, -QUIET) <= self.steps - QUIET for rank in report.ranks])
        if int(active.sum()) < self.fewest - 1:
            return []
        flags = self._series.add(rows, active)
        self._compared += 1
        away = self._rows(self._series.away)
        seen = torch.stack([away.norm, torch.cat([report.cosines, report.cosines[live].median(0).values[None]])])
        self._means += max(_FAST, 1.0 / self._compared) * (seen - self._means)
        self._again += _FAST * (away.again[0] - self._again)
        zero = (square <= _ZERO * usual) & live[:, None]
        single = self._singles(report, self._rows(flags))
        found = []
        for column in (active & (flags.any(0) | zero.any(0) | single.any(0))).nonzero()[:, 0].tolist():
            event = self._judged(report, column, live, zero[:, column], single[:, column], self._rows(flags[:, column]))
            if event is not None:
                found.append(event)
                self._series.forget(column)
        self._has_been_zero |= zero.any(1)
        return found + self._near_pairs(report, live, active)

    def _singles(self, report: RankReport, flags: _Rows) -> Tensor:
        """Return where a single element stands out, ``(L, k)``.

        It is far from the other ranks; or the norm of its layer is raised, and the element's share explains it.
        """
        z, away = self._rows(self._series.z), self._rows(self._series.away)
        floors = self._rows((_BOTH * self._series.furthest)[:, None].clamp(min=FAR))
        loud = z.norm[:-1] > floors.norm[:-1].clamp(min=_LOUD)
        together = (z.peak > _TOGETHER) & (z.share > _TOGETHER) & (report.elements == report.largest)
        # What a single element adds to a usual norm is its share.
        explains = report.shares > _EXPLAINS * (1.0 - (-2.0 * away.norm[:-1]).exp())
        lone = loud & (z.share > floors.share) & explains
        return (flags.peak != 0) | (flags.share != 0) | together | lone

    def _directions(self, report: RankReport, live: Tensor) -> Tensor:
        """Return the cosine of each rank's deviations with those of its last step, and with their running mean."""
        sketches = report.sketches * live[:, None, None]
        size = sketches.square().sum(2).mean(1).sqrt().clamp_(min=TINY)
        own = (sketches / size[:, None, None]).transpose(0, 1).flatten(1)
        found, mean = torch.zeros(2, len(own), dtype=torch.double), own
        if (before := self._before) is not None:
            found = (own * before).sum(2) / (own.norm(dim=1) * before.norm(dim=2)).clamp_(min=TINY)
            mean = _MEMORY * before[1] + (1.0 - _MEMORY) * own
        self._before = torch.stack([own, mean])
        return found

    def _judged(
        self, report: RankReport, column: int, live: Tensor, zero: Tensor, single: Tensor, flags: _Rows
    ) -> RankEvent | None:
        """Return the fault of one rank that explains its flags best; None without one."""
        layers, series, rank = self._layers, self._series, report.ranks[column]
        norm, cosine, peak, _, again = flags
        z, usual = self._rows(series.z[:, column]), self._rows(series.usual)
        sums = (series.sums[:, :, column] / series.bounds[:, 0]).amax(0)  # 1 at the bound
        likely = self._rows(sums)
        likely_norm, likely_cosine = float(likely.norm[-1]), float(likely.cosine[-1])
        mean_norm, mean_cosine = self._means[:, :, column]
        others = torch.cat([self._means[1, :, :column], self._means[1, :, column + 1 :]], 1).median(1).values
        # What is sudden counts as much as what has lasted up to its bound.
        confidence = 1.0 - FALSE_ALARMS ** max(1.0, float(sums.max()))

        def event(fault: str, detail: str, rows: Sequence[int] = ()) -> RankEvent:
            names = tuple(report.layers[row] for row in rows)
            return RankEvent(report.step, rank, fault, names, confidence, detail=detail)

        def seen(row: int) -> tuple[float, float, float, bool]:
            """Return the factor of the norm, the cosine, its usual value, and whether it points against the others."""
            # What is sudden shows in this step; what lasts, in the mean over the last ones.
            turned, normal = mean_cosine[row], float(others[row])
            if z.cosine[row] < -FAR:
                turned = report.cosines[live, column].median() if row == layers else report.cosines[row, column]
            return float(mean_norm[row].exp()), float(turned), normal, float(turned) < min(-0.5 * normal, 0.0)

        if bool(zero[live].all()) and bool(live.any()):
            confidence = 1.0
            return event("zero", "its gradient is zero in every layer")
        new_zero = zero & ~self._has_been_zero & (self._compared > WARMUP)
        bad = (norm[:-1] != 0) | (cosine[:-1] != 0) | single | new_zero
        rows = bad.nonzero()[:, 0].tolist()
        if rows and bool(zero[rows].all()):
            return event("zero", "its gradient is zero there", rows)
        if bool(again.any()) or float(likely.again[0]) > _LIKELY:
            value = float(self._rows(series.away).again[0, column] if z.again[0] > FAR else self._again[column])
            if value >= _REPEATED:
                return event(
                    "repeated",
                    f"its deviations are those of the step before (cosine {value:.2f}): the same batch again",
                )
            alone = not bool(bad.any() or norm[-1] or cosine[-1]) and max(likely_norm, likely_cosine) < _LIKELY
            if bool(again.any()) and alone:
                return event("drifted", "its deviations keep one direction: other weights, or data of its own")
        # A fault of all layers shows in one of them first, and in the mean over the steps in most.
        off = (mean_norm[:-1].abs() > usual.norm[:-1].clamp(min=LEAST))[live]
        widespread = float(off.double().mean()) >= _MOST_LAYERS
        if bool(norm[-1] or cosine[-1] or again.any()) or (rows and not bool(single.any()) and widespread):
            factor, turned, normal, is_against = seen(layers)
            lean_cosine = cosine[-1] != 0 or likely_cosine > _LIKELY
            if lean_cosine and is_against and norm[-1] == 0 and likely_norm < _LIKELY:
                return event("flipped", f"its gradient points against the others' (cosine {turned:.2f})")
            if lean_cosine or not bool(mean_norm[-1].abs() > _FACTOR * usual.norm[-1]):
                return event(
                    "wrong",
                    f"its cosine with the others is {turned:.2f} (usually {normal:.2f}), and its norm "
                    f"{factor:.2f} of theirs: wrong data, or other weights",
                )
            return event("scaled", f"its norm is {factor:.2f} of the others', and its direction theirs")
        if not rows:
            return None
        rows.sort(key=lambda row: -float(z.norm[row].abs() + z.cosine[row].abs()))
        row = rows[0]
        if bool(single[row]):
            place, part = int(report.largest[row, column]), float(report.shares[row, column])
            where = f"element {place} has {part:.0%} of the squared distance from the mean"
            if bool(peak[row]):
                place, far = int(report.elements[row, column]), float(report.deviations[row, column])
                where = f"element {place} is {far:.0f} standard deviations of the other ranks off"
            return event("element", where, [row for row in rows if single[row]])
        factor, turned, normal, is_against = seen(row)
        if bool(cosine[row]) and is_against and norm[row] == 0:
            return event("flipped", f"it points against the others' there (cosine {turned:.2f})", rows)
        if bool(norm[row]):
            return event("scaled", f"its norm is {factor:.2f} of the others' there", rows)
        return event("wrong", f"its cosine with the others is {turned:.2f} there (usually {normal:.2f})", rows)

    def _near_pairs(self, report: RankReport, live: Tensor, active: Tensor) -> list[RankEvent]:
        """Return the pairs of ranks whose gradients point more alike than those of other pairs."""
        k, square = len(report.ranks), report.norms.square()
        first, second = torch.triu_indices(k, k, offset=1)
        size = (square[:, first] * square[:, second]).sqrt()
        cosines = (square[:, first] + square[:, second] - report.gaps.square()[:, first, second]) / (2.0 * size)
        known = live & (size > 0.0).all(1)
        if not bool(known.any()):
            return []
        apart = (1.0 - cosines[known]).clamp_(min=0.0)
        apart = (apart / median_of_rows(apart).clamp(min=1e-6)).median(0).values
        flags = self._pairs.add((apart + 1e-3).log()[None], active[first] & active[second])[0]
        found = []
        for pair in flags.nonzero()[:, 0].tolist():
            one, other = report.ranks[int(first[pair])], report.ranks[int(second[pair])]
            self._pairs.forget(pair)
            detail = (
                f"it is {float(apart[pair]):.2f} as far from rank {other} as others are: a part of the data is the same"
            )
            found.append(RankEvent(report.step, one, "identical", (), 1.0 - FALSE_ALARMS, (other,), detail))
        return found
