"""Values of ranks that are alike where nothing is wrong, followed over the steps: which of them stand out.

Two kinds of evidence. *Sudden*: a value is further from the other ranks than ever before, in units of a running median
deviation. *Lasting*: a rank has the largest (or the smallest) value again and again. Where the ranks draw their data
alike, each place in their order is equally likely in every step, whatever the distribution of the values: the sums
of log-likelihood ratios below have a known chance to pass their bound (Ville 1939; Page 1954 for the restarted sum).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Steps that the running medians begin with.
WARMUP = 20
#: False alarms to be expected in :data:`HORIZON` steps from each kind of lasting evidence.
FALSE_ALARMS, HORIZON = 0.01, 10_000
#: Robust standard deviations up to which a value is never sudden.
FAR = 4.0
#: The least median deviation: a value that all ranks share in every step has none.
LEAST = 0.01
#: What a divisor is at least.
TINY = 1e-300

# Tilt of the likelihood ratio of a place in the order, as a normal score.
_TILT = 1.5
# A value is sudden this far beyond the furthest that counted as clean; or so many steps in a row beyond that one.
_BEYOND, _STREAK = 2.0, 4
# Rate of the running median deviation, and by which the furthest value so far is forgotten, per step.
_RATE, _FORGET = 0.05, 1.0 / 400.0
# From a median absolute deviation to the standard deviation of a normal distribution.
_NORMAL = 1.4826


class Series:
    """The running statistics of ``R`` rows of ``m`` values that are alike where nothing is wrong.

    Args:
        sides: ``(R, 2)``, whether large, and whether small values are a fault.
        lasting: ``(R,)``, the number of rows and sides among which false alarms of lasting evidence are counted; 0 for
            rows in which it does not count.
        sudden: ``(R,)``, robust standard deviations from which a value is sudden; see also :data:`FAR`.
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
        self.away = values - median_of_rows(values[:, active])
        flags = self._lasts(values, active)
        if self._first is None:
            return torch.where(flags == 0, self._sudden(active), flags)
        self._first.append(self.away)
        if len(self._first) == WARMUP:
            seen = torch.stack(self._first, 1).abs().flatten(1)
            self._mad = seen.median(1).values.clamp_(min=LEAST)
            self.furthest = seen.amax(1) / (_NORMAL * self._mad)
            self._first = None
        return flags

    def _sudden(self, active: Tensor) -> Tensor:
        self.z = self.away / self.usual[:, None]
        size, sign = self.z.abs(), self.z.sign()
        wrong = torch.where(sign > 0, self._sides[:, :1], self._sides[:, 1:])
        over = sign * ((size > self.furthest.clamp(min=FAR)[:, None]) & active)
        self._streak = torch.where(over * self._streak > 0, self._streak + over, over)
        broken = torch.where(self._streak == 0, self._most, 0.0)
        self._most = torch.where(over != 0, torch.maximum(self._most, size), 0.0)
        clean = torch.maximum(broken, torch.where(over == 0, size, 0.0))[:, active].amax(1)
        out = (size > torch.maximum(self.furthest * _BEYOND, self._limits)[:, None]) | (self._streak.abs() >= _STREAK)
        self.furthest = torch.maximum(self.furthest * (1.0 - _FORGET), clean)
        step = (self.away[:, active].abs() - self._mad[:, None]).sign().mean(1)
        self._mad = (self._mad * (_RATE * step).exp()).clamp_(min=LEAST)
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


def median_of_rows(values: Tensor) -> Tensor:
    """Return the median of each row, ``(R, 1)``, between the two middle values where their number is even."""
    ordered, members = values.sort(1).values, values.shape[1]
    return 0.5 * (ordered[:, (members - 1) // 2] + ordered[:, members // 2])[:, None]
