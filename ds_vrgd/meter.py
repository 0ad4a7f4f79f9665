"""The batch-size meter: the gradient noise scale over many steps, with a confidence interval, whole and by layer.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.2 and appendix A.1: the ratio of
two running means, of ``tr(Sigma)`` and of ``|G|^2``, instead of a running mean of ratios, which would be biased and
has no variance. The interval is Fieller's (1954) for a ratio of two means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ds_vrgd.optim import arguments
from ds_vrgd.statistics import find_optimizer, gradient_noise

DECAY, CONFIDENCE = 0.99, 0.95

# Fewer steps than that, weighed, say nothing about their own spread.
_FEWEST_STEPS = 4.0
_ROWS = 7


@dataclass(frozen=True)
class NoiseScale:
    """A noise scale in samples, and the interval that it lies in.

    Attributes:
        value: ``tr(Sigma) / |G|^2``; infinite while the averaged ``|G|^2`` is not positive.
        low, high: the ends of the interval, 0 and infinity where the steps so far set none.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class NoiseScaleEstimate(NoiseScale):
    """What a meter has found, over all layers and layer by layer.

    Attributes:
        confidence: of the intervals.
        steps: that were counted.
        layers: by parameter name.
    """

    confidence: float
    steps: int
    layers: dict[str, NoiseScale]


class RatioOfMeans:
    """Ratios of two running means, many side by side, with their intervals: all on one device, without a host sync.

    A value ``n`` steps old weighs ``decay**n``. The values of different steps are taken to be independent, as the noise
    of different batches is. A drift of the means widens the interval: it is for the averages, not for the newest step.

    Args:
        decay: in (0, 1]; 1 weighs all steps alike.
        sums: ``(7, C)`` of an earlier instance; it goes on from there.
    """

    def __init__(self, decay: float, sums: Tensor | None = None) -> None:
        self.decay = decay
        self.sums = torch.zeros(_ROWS, 0, dtype=torch.float64) if sums is None else sums

    def add(self, top: Tensor, bottom: Tensor) -> None:
        """Count one step.

        Args:
            top, bottom: ``(C,)``, ``C`` the same in each call, or larger: the columns behind are new then. NaN leaves a
                column as it is, without this step.
        """
        self.sums = self.sums.to(top.device)
        if new := len(top) - self.sums.shape[1]:
            self.sums = torch.cat([self.sums, self.sums.new_zeros(_ROWS, new)], 1)
        values = torch.stack([top, bottom]).double()
        weight, squares, means, spreads = self.sums.split([1, 1, 2, 3])
        before, weight = self.decay * weight, self.decay * weight + 1.0
        change = values - means
        # Welford's update with weights: centred, so that nothing cancels.
        products = torch.stack([change[0] * change[0], change[0] * change[1], change[1] * change[1]])
        updated = torch.cat(
            [
                weight,
                self.decay**2 * squares + 1.0,
                means + change / weight,
                self.decay * spreads + before / weight * products,
            ]
        )
        self.sums = torch.where(values.isnan().any(0), self.sums, updated)

    def intervals(self, confidence: float, longer: float = 1.0) -> Tensor:
        """``(3, C)``: ratio, low, high.

        Fieller's set of all ratios B at which ``mean(top) - B mean(bottom)`` is not told from 0: of the t statistic
        whose degrees of freedom are those of the weights, ``(sum w)^2 / sum w^2 - 1``. Its positive part has no upper
        end where ``mean(bottom)`` itself is not told from 0.

        Args:
            confidence: of the interval, in (0, 1).
            longer: foretell what ``longer`` times the steps would give, with the same means and spread.
        """
        weight, squares, top, bottom, *spreads = self.sums
        steps = weight.square() / squares
        # Of the weighted means: sum w^2 / (sum w)^2 times the variance of one step, weighed without bias.
        factor = 1.0 / (longer * steps * (weight - squares / weight))
        vtt, vtb, vbb = (spread * factor for spread in spreads)
        t2 = _student(longer * steps - 1.0, confidence).square()
        a, b, c = bottom.square() - t2 * vbb, top * bottom - t2 * vtb, top.square() - t2 * vtt
        root = (b.square() - a * c).clamp(min=0.0).sqrt()
        known = longer * steps >= _FEWEST_STEPS
        low = torch.where(known & (c > 0), c / (b + root), 0.0)
        high = torch.where(known & (a > 0) & (bottom > 0), (b + root) / a, math.inf)
        return torch.stack([torch.where(bottom > 0, top / bottom, math.inf), low, high])


class NoiseScaleMeter:
    """Averages the gradient noise scale over the steps, in whole and by layer.

    ::

        meter = ds_vrgd.NoiseScaleMeter()
        for batch in data:
            ...  # forward, backward, step
            meter.update(engine)
        meter.estimate()  # NoiseScaleEstimate(value=412.0, low=350.1, high=495.7, confidence=0.95, steps=100, ...)

    Every rank that updates it has the same estimate. An update is a few small operations on the optimizer's device: no
    collective and no host sync; :meth:`estimate` and :meth:`state_dict` wait for the device once.

    Args:
        decay: a step n steps old weighs ``decay**n``: 0.99 remembers about 200 steps. 1 weighs all alike.
        confidence: of the interval, in (0, 1).
        chunk_size: samples in one micro-batch on one rank; a DeepSpeed engine knows it.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self, *, decay: float = DECAY, confidence: float = CONFIDENCE, chunk_size: float | None = None
    ) -> None:
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay={decay} must lie in (0, 1]")
        if not 0.0 < confidence < 1.0:
            raise ValueError(f"confidence={confidence} must lie in (0, 1)")
        if chunk_size is not None:
            arguments.above("chunk_size", chunk_size, 0.0)
        self._confidence, self._chunk_size = confidence, chunk_size
        self._means = RatioOfMeans(decay)
        self._places: dict[str, int] = {}  # of the layers, behind the whole model
        self._steps = 0
        self._last: Tensor | None = None

    def update(self, engine_or_optimizer: Any) -> bool:
        """Count the step that was just taken.

        Returns:
            Whether there was one: False where nothing was measured since the last update, because the step was skipped
            or an accumulation is not complete.

        Raises:
            TypeError, ValueError, NoiseScaleUnknown: as ``ds_vrgd.noise_scale``.
        """
        measured = find_optimizer(engine_or_optimizer).layer_statistics
        if not measured or measured[0].square is self._last:
            return False
        noise = gradient_noise(engine_or_optimizer, self._chunk_size)
        self._last = measured[0].square
        for name in noise.names:
            self._places.setdefault(name, 1 + len(self._places))
        columns = torch.stack([noise.trace, noise.signal])
        columns = torch.cat([columns.sum(1, keepdim=True), columns], 1)
        if noise.names != tuple(self._places):  # some layers had no gradient, or they come in another order
            places = torch.tensor([0, *map(self._places.__getitem__, noise.names)], device=columns.device)
            columns = columns.new_full((2, 1 + len(self._places)), math.nan).index_copy(1, places, columns)
        self._means.add(*columns)
        self._steps += 1
        return True

    def estimate(self) -> NoiseScaleEstimate:
        """The noise scale over the steps so far.

        Raises:
            RuntimeError: no step was counted.
        """
        if not self._steps:
            raise RuntimeError(
                "NoiseScaleMeter has counted no step: call update(engine) after each step of an optimizer of ds_vrgd "
                "with gamma < 1"
            )
        (value, low, high), *layers = self._means.intervals(self._confidence).T.tolist()
        of_layers = {name: NoiseScale(*row) for name, row in zip(self._places, layers, strict=True)}
        return NoiseScaleEstimate(value, low, high, self._confidence, self._steps, of_layers)

    def state_dict(self) -> dict[str, Any]:
        """All that was counted, in plain Python, so that JSON keeps it bit for bit."""
        return {"steps": self._steps, "layers": list(self._places), "sums": self._means.sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`.

        Raises:
            ValueError: it is none.
        """
        keys = {"steps", "layers", "sums"}
        sums = torch.tensor(state.get("sums", ()), dtype=torch.float64)
        columns = 1 + len(state.get("layers", ())) if state.get("steps") else 0
        if state.keys() != keys or sums.shape != (_ROWS, columns):
            raise ValueError(f"no state of a NoiseScaleMeter: {', '.join(map(str, state))}, sums of {[*sums.shape]}")
        self._steps = int(state["steps"])
        self._places = {name: place for place, name in enumerate(state["layers"], start=1)}
        self._means = RatioOfMeans(self._means.decay, sums)


def _student(freedom: Tensor, confidence: float) -> Tensor:
    """Two-sided quantile of Student's t: the expansion of Abramowitz and Stegun, 26.7.5, to the third order."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    n = freedom.clamp(min=1.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3
