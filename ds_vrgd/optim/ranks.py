"""A report on the ranks of every step, and a watch that names the one that differs, its layers and the kind of fault.

Two kinds of evidence. *Sudden*: a value is further from the other ranks than ever before, in units of a running median
deviation. *Lasting*: a rank has the largest (or the smallest) value again and again. Where the ranks draw their data
alike, each place in their order is equally likely in every step, whatever the distribution of the values: the sums
of log-likelihood ratios below have a known chance to pass their bound (Ville 1939; Page 1954 for the restarted sum).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_vrgd.moments.compare import LEAST_SHARE, Comparison, RankSums, add_rows_, columns_of, views
from ds_vrgd.moments.layout import SUM_DTYPE
from ds_vrgd.moments.streams import on_host
from ds_vrgd.optim import world
from ds_vrgd.optim.observer import BadGradient, Observer

#: Ranks that can be compared: of three, one that differs cannot be told from two that do.
FEWEST_RANKS = 4
#: Steps that the running medians begin with.
WARMUP = 20
#: False alarms to be expected in :data:`HORIZON` steps from each kind of lasting evidence.
FALSE_ALARMS, HORIZON = 0.01, 10_000
#: The other ranks are quiet about a fault that was told for this many steps.
QUIET = 100

# Tilt of the likelihood ratio of a place in the order, as a normal score.
_TILT = 1.5
# A value is sudden this many robust standard deviations out, and this far beyond the furthest that counted as clean.
_SUDDEN, _BEYOND = 30.0, 2.0
# The same for the largest deviation of an element, whose logarithm has an exponential tail; for the largest share of
# one; and for both together.
_SUDDEN_ELEMENT, _SUDDEN_SHARE, _TOGETHER = 20.0, 14.0, 8.0
# So many steps in a row beyond that furthest value are sudden, too; values less far out than _FAR are never.
_STREAK, _FAR = 4, 4.0
# An element stands out where its share does, and the norm of its layer is this far out; both that far beyond before.
_LOUD, _BOTH = 12.0, 1.25
# The share of an element explains a norm that is raised by no more than what it adds, within this part.
_EXPLAINS = 0.9
# The least median deviation: a value that all ranks share in every step has none.
_LEAST = 0.01
# Rate of the running median deviation, and by which the furthest value so far is forgotten, per step.
_RATE, _FORGET = 0.05, 1.0 / 400.0
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
# From a median absolute deviation to the standard deviation of a normal distribution.
_NORMAL = 1.4826
_TINY, _MOST = 1e-300, 0.9999


@dataclass(frozen=True)
class RankReport:
    """The ranks' gradients of one step side by side: ``L`` layers, ``k`` ranks; tensors on the CPU in fp64.

    A window's micro-batches are compared one by one, and their squares are averaged.

    Attributes:
        step: number of the optimizer step, from 0.
        ranks: the global ranks, in the order of the columns.
        layers: names of the layers.
        norms: ``(L, k)``, 2-norm of each rank's gradient.
        distances: ``(L, k)``, distance from the mean over the ranks.
        cosines: ``(L, k)``, cosine with the mean of the other ranks.
        gaps: ``(L, k, k)``, distance between two ranks.
        nonfinite: ``(L, k)`` int64, number of values that are NaN, infinite or beyond 2^48, which count as 0 elsewhere.
        deviations: ``(L, k)``, largest leave-one-out deviation of one element, in standard deviations of the others.
        elements: ``(L, k)`` int64, the index of that element in the flattened layer.
        shares: ``(L, k)``, the share of one element in the squared distance from the mean, where it is largest.
        largest: ``(L, k)`` int64, the index of that element.
        sketches: ``(L, k, 16)``, projections of the deviations on random signs, the same in every step.
        nodes: the same of the nodes' mean gradients, where gradients stay in a node: its ``ranks`` are the first of
            each node. None where there is one node.
    """

    step: int
    ranks: tuple[int, ...]
    layers: tuple[str, ...]
    norms: Tensor
    distances: Tensor
    cosines: Tensor
    gaps: Tensor
    nonfinite: Tensor
    deviations: Tensor
    elements: Tensor
    shares: Tensor
    largest: Tensor
    sketches: Tensor
    nodes: RankReport | None = None

    @classmethod
    def of_sums(
        cls, step: int, layers: Sequence[str], ranks: Sequence[int], sums: RankSums, unit: float = 1.0
    ) -> RankReport:
        """Return the report of sums over whole layers; ``unit`` multiplies the gradients' squares."""
        k = len(ranks)
        gram = sums.gram.to("cpu", SUM_DTYPE) * unit
        centred, mean, square = gram[:, :k, :k], gram[:, :k, k], gram[:, k, k, None]
        own = centred.diagonal(dim1=1, dim2=2)
        norms = sums.square.to("cpu", SUM_DTYPE) * unit
        # The others' mean is (k gbar - g) / (k - 1).
        with_mean = mean + square
        along = k * with_mean - norms
        others = (k * k * square - 2.0 * k * with_mean + norms).clamp_(min=0.0)
        cosines = along / (norms * others).sqrt().clamp_(min=_TINY)
        gaps = (own[:, :, None] + own[:, None, :] - 2.0 * centred).clamp_(min=0.0)
        largest, element = sums.largest.cpu().double(), sums.element.cpu()
        return cls(
            step, tuple(ranks), tuple(layers), norms.sqrt(), own.sqrt(), cosines.clamp_(-1.0, 1.0), gaps.sqrt(),
            sums.nonfinite.cpu().long(), largest[:, 0].sqrt(), element[:, 0],
            (largest[:, 1] * unit / own.clamp(min=_TINY)).clamp_(max=1.0), element[:, 1],
            sums.sketch.to("cpu", SUM_DTYPE) * math.sqrt(unit),
        )  # fmt: skip

    @classmethod
    def of_gradients(cls, gradients: Sequence[Mapping[str, Tensor]], step: int = 0) -> RankReport:
        """Return the report of gradients that one process holds: what an engine's owner of all elements would find.

        Args:
            gradients: of each rank, by layer; the same layers and shapes for all.
            step: number of the step.
        """
        layers, ranks = list(gradients[0]), len(gradients)
        sums = torch.zeros(len(layers), columns_of(ranks), dtype=SUM_DTYPE)
        found = views(sums, torch.zeros(len(layers), 2, ranks, dtype=torch.long))
        for index, layer in enumerate(layers):
            rows = torch.stack([of_rank[layer].detach().flatten() for of_rank in gradients])
            add_rows_(rows, [(0, rows.shape[1], index, 0)], found)
        return cls.of_sums(step, layers, range(ranks), found)

    def whole(self) -> tuple[list[float], list[float], list[float]]:
        """Return three numbers of each rank for a curve.

        They are the median over the layers of its norm, over the ranks' median; that of its cosine with the other
        ranks; and its largest leave-one-out deviation of an element.
        """
        usual = _median(self.norms)
        live = usual[:, 0] > 0.0
        if not bool(live.any()):
            nothing = [0.0] * len(self.ranks)
            return nothing, nothing, nothing
        relative = (self.norms / usual)[live].median(0).values
        return relative.tolist(), self.cosines[live].median(0).values.tolist(), self.deviations.amax(0).tolist()


@dataclass(frozen=True)
class RankEvent:
    """A rank whose gradient is not like those of the others.

    Attributes:
        step: number of the optimizer step that showed it, from 0.
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


class _Series:
    """The running statistics of ``R`` rows of ``m`` values that are alike where nothing is wrong.

    Args:
        sides: ``(R, 2)``, whether large, and whether small values are a fault.
        lasting: ``(R,)``, the number of rows and sides among which false alarms of lasting evidence are counted; 0 for
            rows in which it does not count.
        sudden: ``(R,)``, robust standard deviations from which a value is sudden.
        members: ``m``.

    Attributes:
        away: ``(R, m)``, deviations of the last step from the row's median.
        z: the same in robust standard deviations; 0 in the warm-up.
        sums: ``(2, R, m)``, restarted sums of log-likelihood ratios, of large and of small values.
        bounds: ``(R, 1)``, of those sums.
        furthest: ``(R,)``, the largest ``|z|`` that counted as clean.
    """

    def __init__(self, sides: Tensor, lasting: Tensor, sudden: Tensor, members: int) -> None:
        rows = len(sides)
        self.away = self.z = torch.zeros(rows, members, dtype=torch.double)
        self.sums = torch.zeros(2, rows, members, dtype=torch.double)
        self.furthest = torch.zeros(rows, dtype=torch.double)
        tests = lasting.double() * members * HORIZON / FALSE_ALARMS
        self.bounds = torch.where(lasting > 0, tests.log(), math.inf)[:, None]
        self._sides, self._limits, self._mad = sides.double(), sudden.double(), self.furthest
        self._streak, self._most = self.z, self.z
        self._first: list[Tensor] | None = []

    def add(self, values: Tensor, active: Tensor) -> Tensor:
        """Count a step; return which of ``values``, ``(R, m)``, are too large (1) or too small (-1), and 0 elsewhere.

        Members that are not ``active``, ``(m,)``, are left out: one that stands out would move the others' places.
        """
        self.away = values - _median(values[:, active])
        flags = self._lasts(values, active)
        if self._first is None:
            return torch.where(flags == 0, self._sudden(active), flags)
        self._first.append(self.away)
        if len(self._first) == WARMUP:
            seen = torch.stack(self._first, 1).abs().flatten(1)
            self._mad = seen.median(1).values.clamp_(min=_LEAST)
            self.furthest = seen.amax(1) / (_NORMAL * self._mad)
            self._first = None
        return flags

    def _sudden(self, active: Tensor) -> Tensor:
        self.z = self.away / self.usual[:, None]
        size, sign = self.z.abs(), self.z.sign()
        wrong = torch.where(sign > 0, self._sides[:, :1], self._sides[:, 1:])
        over = sign * ((size > self.furthest.clamp(min=_FAR)[:, None]) & active)
        self._streak = torch.where(over * self._streak > 0, self._streak + over, over)
        broken = torch.where(self._streak == 0, self._most, 0.0)
        self._most = torch.where(over != 0, torch.maximum(self._most, size), 0.0)
        clean = torch.maximum(broken, torch.where(over == 0, size, 0.0))[:, active].amax(1)
        out = (size > torch.maximum(self.furthest * _BEYOND, self._limits)[:, None]) | (self._streak.abs() >= _STREAK)
        self.furthest = torch.maximum(self.furthest * (1.0 - _FORGET), clean)
        step = (self.away[:, active].abs() - self._mad[:, None]).sign().mean(1)
        self._mad = (self._mad * (_RATE * step).exp()).clamp_(min=_LEAST)
        return sign * wrong * (out & active)

    def _lasts(self, values: Tensor, active: Tensor) -> Tensor:
        others, members = values[:, active], int(active.sum())
        below = (others[:, None, :] < values[:, :, None]).sum(2)
        equal = (others[:, None, :] == values[:, :, None]).sum(2)
        # The place in the order, with half of a tie; each is its own.
        score = _TILT * torch.special.ndtri((below + 0.5 * equal).double() / members)
        every = torch.special.ndtri((torch.arange(members, dtype=torch.double) + 0.5) / members)
        expected = (_TILT * every).exp().mean().log()
        self.sums = torch.where(active, (self.sums + torch.stack([score, -score]) - expected).clamp_(min=0.0), 0.0)
        high, low = self.sums > self.bounds
        flags: Tensor = high * self._sides[:, :1] - low * self._sides[:, 1:]
        return flags

    @property
    def usual(self) -> Tensor:
        """Return the robust standard deviation of each row, ``(R,)``; 0 in the warm-up."""
        return _NORMAL * self._mad

    def forget(self, member: int) -> None:
        """Begin the sums of one member anew."""
        self.sums[:, :, member] = 0.0
        self._streak[:, member] = 0.0


class RankWatch:
    """Follows the reports of a training, and names ranks that are not like the others.

    ::

        watch = ds_vrgd.RankWatch()
        for batch in data:
            ...  # forward, backward, step
            for event in watch.update(ds_vrgd.rank_report(engine)):
                print(event)  # step 812, rank 5: scaled in 'head.weight': it has 0.50 of the others' norm there (...)

    It takes the data of the ranks to be drawn alike. NaN and identical gradients are named at once; what is far beyond
    everything before, in the first to the fourth step, after the first 20; what is a little off in every step, after
    ten to thirty, a sign in up to a hundred. With fewer than four ranks only NaN and identical gradients are reported.
    For 100 steps after a rank was named, only faults that need no statistics are reported of it.

    Attributes:
        events: all events so far.
        steps: number of reports counted.
    """

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
        if ranks < FEWEST_RANKS:
            return
        # Rows: norm and cosine, by layer and of the whole gradient; peak and share by layer; repeats and drifts.
        both, large, small = [1, 1], [1, 0], [0, 1]
        many = 3 * layers
        kinds = [(both, many, _SUDDEN, layers), (both, 6, _SUDDEN, 1), (small, many, _SUDDEN, layers)]
        kinds += [(small, 6, _SUDDEN, 1), (large, 0, _SUDDEN_ELEMENT, layers), (large, 0, _SUDDEN_SHARE, layers)]
        kinds += [(large, 6, _SUDDEN, 2)]
        counts = torch.tensor([count for *_, count in kinds])
        sides, among, limits = (
            torch.tensor([kind[index] for kind in kinds]).repeat_interleave(counts, 0) for index in range(3)
        )
        self._series = _Series(sides, among, limits, ranks)
        pairs = ranks * (ranks - 1) // 2
        # Two batches may share a rare sample once: a pair is reported only where it lasts.
        self._pairs = _Series(torch.tensor([small]), torch.tensor([1]), torch.tensor([math.inf]), pairs)
        self._means = torch.zeros(2, layers + 1, ranks, dtype=torch.double)
        self._again = torch.zeros(ranks, dtype=torch.double)
        self._has_been_zero = torch.zeros(layers, dtype=torch.bool)

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
        if not found and len(report.ranks) >= FEWEST_RANKS:
            found = self._compare(report)
        return self.tell(found)

    def tell(self, found: Sequence[RankEvent]) -> list[RankEvent]:
        """Keep those of some events that were not told before, and return them."""
        new = [event for event in found if self._is_new(event)]
        self.events += new
        return new

    def _is_new(self, event: RankEvent) -> bool:
        """Return whether an event is to be told, and remember that it was."""
        fault = event.fault if event.confidence == 1.0 else ""
        named = [self._told.get((rank, fault), -QUIET) for rank in (event.rank, *event.peers)]
        is_new = max(named) <= self.steps - QUIET
        if is_new:
            for rank in (event.rank, *event.peers):
                self._told[rank, fault] = self._told[rank, ""] = self.steps
            if event.fault not in ("element", "nonfinite"):  # which pass, as a rule
                self._out |= dict.fromkeys((event.rank, *event.peers)[-1:], self.steps)
        return is_new

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
        spread = report.distances.square()
        spread = spread[:, :, None] + spread[:, None, :]
        size = report.norms.square()
        size = size[:, :, None] + size[:, None, :]
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
        norms = 0.5 * (square / usual.clamp(min=_TINY) + _LEAST_NORM).log()
        cosines = report.cosines.clamp(-_MOST, _MOST).atanh()  # whose spread depends less on their size
        # Where the others have no spread, as after a dead unit, a small element seems far out.
        most = 0.5 * math.sqrt((len(report.ranks) - 2) / LEAST_SHARE)
        measured = (report.deviations < most) | (report.elements == report.largest)
        deviations = torch.where(measured, report.deviations, 0.0)
        values = torch.stack([norms, cosines, (deviations + 1e-6).log(), (report.shares + 1e-9).log()])
        values = torch.where(live[:, None], values, 0.0)
        whole = (values[:2] - _median(values[:2].flatten(0, 1)).view(2, layers, 1))[:, live]
        whole = whole.median(1, keepdim=True).values if whole.shape[1] else values.new_zeros(2, 1, len(report.ranks))
        first = torch.cat([values[:2], whole], 1)
        rows = [first.flatten(0, 1), values[2:].flatten(0, 1), self._directions(report, live)]
        active = torch.tensor([self._out.get(rank, -QUIET) <= self.steps - QUIET for rank in report.ranks])
        if int(active.sum()) < FEWEST_RANKS - 1:
            return []
        flags = self._series.add(torch.cat(rows), active)
        self._compared += 1
        away = self._series.away[: 2 * layers + 2].view(2, layers + 1, -1)
        away = torch.stack([away[0], torch.cat([report.cosines, report.cosines[live].median(0).values[None]])])
        self._means += max(_FAST, 1.0 / self._compared) * (away - self._means)
        self._again += _FAST * (self._series.away[-2] - self._again)
        zero = (square <= _ZERO * usual) & live[:, None]
        single = self._singles(report, flags)
        found = []
        for column in (active & (flags.any(0) | zero.any(0) | single.any(0))).nonzero()[:, 0].tolist():
            event = self._judged(report, column, live, zero[:, column], single[:, column], flags[:, column])
            if event is not None:
                found.append(event)
                self._series.forget(column)
        self._has_been_zero |= zero.any(1)
        return found + self._near_pairs(report, live, active)

    def _singles(self, report: RankReport, flags: Tensor) -> Tensor:
        """Return where a single element stands out, ``(L, k)``.

        It is far from the other ranks; or the norm of its layer is raised, and the element's share explains it.
        """
        layers, z = self._layers, self._series.z
        elements = slice(2 * layers + 2, 4 * layers + 2)
        floors = (_BOTH * self._series.furthest)[:, None].clamp(min=_FAR)
        loud = z[:layers] > floors[:layers].clamp(min=_LOUD)
        share = (z[elements] > floors[elements])[layers:]
        together = (z[elements] > _TOGETHER).view(2, layers, -1).all(0) & (report.elements == report.largest)
        # What a single element adds to a usual norm is its share.
        explains = report.shares > _EXPLAINS * (1.0 - (-2.0 * self._series.away[:layers]).exp())
        return flags[elements].view(2, layers, -1).any(0) | together | (loud & share & explains)

    def _directions(self, report: RankReport, live: Tensor) -> Tensor:
        """Return the cosine of each rank's deviations with those of its last step, and with their running mean."""
        sketches = report.sketches * live[:, None, None]
        size = sketches.square().sum(2).mean(1).sqrt().clamp_(min=_TINY)
        own = (sketches / size[:, None, None]).transpose(0, 1).flatten(1)
        found, mean = torch.zeros(2, len(own), dtype=torch.double), own
        if (before := self._before) is not None:
            found = (own * before).sum(2) / (own.norm(dim=1) * before.norm(dim=2)).clamp_(min=_TINY)
            mean = _MEMORY * before[1] + (1.0 - _MEMORY) * own
        self._before = torch.stack([own, mean])
        return found

    def _judged(
        self, report: RankReport, column: int, live: Tensor, zero: Tensor, single: Tensor, flags: Tensor
    ) -> RankEvent | None:
        """Return the fault of one rank that explains its flags best; None without one."""
        layers, series, rank = self._layers, self._series, report.ranks[column]
        norm, cosine, peak, _, again = flags.split([layers + 1, layers + 1, layers, layers, 2])
        z_norm, z_cosine, *_ = series.z[:, column].split([layers + 1, layers + 1, layers, layers, 2])
        mean_norm, mean_cosine = self._means[:, :, column]
        has_factor = mean_norm.abs() > _FACTOR * series.usual[: layers + 1]
        others = torch.cat([self._means[1, :, :column], self._means[1, :, column + 1 :]], 1).median(1).values
        likely = (series.sums[:, :, column] / series.bounds[:, 0]).amax(0)  # 1 at the bound
        likely_norm, likely_cosine = float(likely[layers]), float(likely[2 * layers + 1])
        # What is sudden counts as much as what has lasted up to its bound.
        confidence = 1.0 - FALSE_ALARMS ** max(1.0, float(likely.max()))

        def event(fault: str, detail: str, rows: Sequence[int] = ()) -> RankEvent:
            names = tuple(report.layers[row] for row in rows)
            return RankEvent(report.step, rank, fault, names, confidence, detail=detail)

        if bool(zero[live].all()) and bool(live.any()):
            confidence = 1.0
            return event("zero", "its gradient is zero in every layer")
        new_zero = zero & ~self._has_been_zero & (self._compared > WARMUP)
        bad = (norm[:-1] != 0) | (cosine[:-1] != 0) | single | new_zero
        # A fault of all layers shows in one of them first, and in the mean over the steps in most.
        usual_norm = series.usual[:layers].clamp(min=_LEAST)
        widespread = float((mean_norm[:-1].abs() > usual_norm)[live].double().mean()) >= _MOST_LAYERS
        rows = bad.nonzero()[:, 0].tolist()
        if rows and bool(zero[rows].all()):
            return event("zero", "its gradient is zero there", rows)
        lean_cosine = cosine[-1] != 0 or likely_cosine > _LIKELY
        # What is sudden shows in this step; what lasts, in the mean over the last ones.
        value = float(series.away[-2, column] if series.z[-2, column] > _FAR else self._again[column])
        if bool(again.any()) or float(likely[-2]) > _LIKELY:
            if value >= _REPEATED:
                return event(
                    "repeated",
                    f"its deviations are those of the step before (cosine {value:.2f}): the same batch again",
                )
            alone = not bool(bad.any() or norm[-1] or cosine[-1]) and max(likely_norm, likely_cosine) < _LIKELY
            if bool(again.any()) and alone:
                return event("drifted", "its deviations keep one direction: other weights, or data of its own")
        if bool(norm[-1] or cosine[-1] or again.any()) or (rows and not bool(single.any()) and widespread):
            usual, factor = float(others[-1]), float(mean_norm[-1].exp())
            turned = float(report.cosines[live, column].median() if z_cosine[-1] < -_FAR else mean_cosine[-1])
            if lean_cosine and turned < min(-0.5 * usual, 0.0) and norm[-1] == 0 and likely_norm < _LIKELY:
                return event("flipped", f"its gradient points against the others' (cosine {turned:.2f})")
            if lean_cosine or not bool(has_factor[-1]):
                return event(
                    "wrong",
                    f"its cosine with the others is {turned:.2f} (usually {usual:.2f}), and its norm "
                    f"{factor:.2f} of theirs: wrong data, or other weights",
                )
            return event("scaled", f"its norm is {factor:.2f} of the others', and its direction theirs")
        if not rows:
            return None
        rows.sort(key=lambda row: -float(z_norm[row].abs() + z_cosine[row].abs()))
        row = rows[0]
        if bool(single[row]):
            place, part = int(report.largest[row, column]), float(report.shares[row, column])
            where = f"element {place} has {part:.0%} of the squared distance from the mean"
            if bool(peak[row]):
                place, far = int(report.elements[row, column]), float(report.deviations[row, column])
                where = f"element {place} is {far:.0f} standard deviations of the other ranks off"
            return event("element", where, [row for row in rows if single[row]])
        usual, factor = float(others[row]), float(mean_norm[row].exp())
        turned = float(report.cosines[row, column] if z_cosine[row] < -_FAR else mean_cosine[row])
        if bool(cosine[row]) and turned < min(-0.5 * usual, 0.0) and norm[row] == 0:
            return event("flipped", f"it points against the others' there (cosine {turned:.2f})", rows)
        if bool(norm[row]):
            return event("scaled", f"its norm is {factor:.2f} of the others' there", rows)
        return event("wrong", f"its cosine with the others is {turned:.2f} there (usually {usual:.2f})", rows)

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
        apart = (apart / _median(apart).clamp(min=1e-6)).median(0).values
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

    The sums are on their way to the CPU while the weights are updated, and are judged after that.

    Args:
        optimizer: name of its class.
        policy: its argument ``watch``.

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
        if self._is_first and (ranks := len(comparison.ranks)) < FEWEST_RANKS:
            world.warn(
                f"{self._optimizer}: watch={self._policy!r} has {ranks} rank{'s' * (ranks > 1)} to compare, and of "
                f"fewer than {FEWEST_RANKS} none can be said to be unlike the others. NaN, infinities and identical "
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


def _median(values: Tensor) -> Tensor:
    """Return the median of each row, ``(R, 1)``, between the two middle values where their number is even."""
    ordered, members = values.sort(1).values, values.shape[1]
    return 0.5 * (ordered[:, (members - 1) // 2] + ordered[:, members // 2])[:, None]
