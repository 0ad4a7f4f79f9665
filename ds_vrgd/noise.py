"""The statistics of the last step, by layer, and the gradient noise scale: of one step, and averaged over many.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", section 2.2 and appendix A.1. The meter
takes the ratio of two running means, of ``tr(Sigma)`` and of ``|G|^2``: a running mean of ratios would be biased, and
would have no variance. The interval is Fieller's (1954) for a ratio of two means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.optim import LayerStatistics, RankReport, find_optimizer

DECAY, CONFIDENCE = 0.99, 0.95

# Fewer steps, counted by weight, say nothing about their own spread.
_FEWEST_STEPS = 4.0
_ROWS = 7


@dataclass(frozen=True)
class LayerGSNR:
    """One layer's GSNR at the last step.

    Attributes:
        mean_ratio: mean over the layer of the raw ratio (equation 2), before it is normalised.
        clamped_low: fraction of the elements whose normalised ratio was raised to gamma.
        clamped_high: fraction whose normalised ratio was lowered to 1.
        noise_low, noise_high: both fractions for pure noise (:func:`clamped_by_noise`); None up to k = 3.
    """

    mean_ratio: float
    clamped_low: float
    clamped_high: float
    noise_low: float | None = None
    noise_high: float | None = None


@dataclass(frozen=True)
class GSNRStatistics:
    """The statistics of the last optimizer step.

    Attributes:
        k: number of chunks: data-parallel ranks x micro-batches.
        layers: by parameter name.
    """

    k: int
    layers: dict[str, LayerGSNR]

    def means(self) -> LayerGSNR:
        """Return the means over the layers, whatever their size."""
        columns = zip(*map(astuple, self.layers.values()), strict=True)
        means: list[Any] = [None if None in column else sum(column) / len(column) for column in columns]
        return LayerGSNR(*means)


def clamped_by_noise(k: int, gamma: float) -> tuple[float, float] | None:
    """Return the fractions of the elements that are clamped to gamma and to 1 if the gradient is pure noise.

    For independent normal chunks of mean zero the raw ratio is ``t^2 / (k - 1)``, with Student's t of ``k - 1`` degrees
    of freedom. Its mean is ``1 / (k - 3)``, so the normalised ratio of a large layer is ``t^2 (k - 3) / (k - 1)``.
    Source: Abramowitz and Stegun, 26.7.3 and 26.7.4, for the distribution of t.

    Args:
        k: number of chunks.
        gamma: floor of the ratio.

    Returns:
        Two fractions in (0, 1); None where k is below 4, since the mean is infinite, or gamma is not in (0, 1).
    """
    if k < 4 or not 0.0 < gamma < 1.0:
        return None
    return _noise_below(gamma, k), 1.0 - _noise_below(1.0, k)


@lru_cache(maxsize=64)
def _noise_below(bound: float, k: int) -> float:
    """Return the probability that the normalised ratio of pure noise is below ``bound``."""
    angle = math.atan(math.sqrt(bound / (k - 3)))
    odd = k % 2 == 0  # k - 1 degrees of freedom
    cosine, total = math.cos(angle), 0.0
    term = cosine if odd else 1.0
    for power in range(odd, k - 2, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return (angle + total) * 2.0 / math.pi if odd else total


def _measured(engine_or_optimizer: Any) -> list[LayerStatistics]:
    optimizer = find_optimizer(engine_or_optimizer)
    if measured := list(optimizer.layer_statistics):
        return measured
    name = type(optimizer).__name__
    raise RuntimeError(
        f"{name} has measured no GSNR: either it has not stepped yet, or gamma=1.0 turns GSNR off, or its last window "
        "had one chunk"
    )


def gsnr_stats(engine_or_optimizer: Any) -> GSNRStatistics:
    """Return the GSNR of every layer at the last step, the same on all ranks. This is not a collective.

    With expert parallelism a rank reports the experts that it holds, numbered over all ranks. The k is that of the
    other layers.

    Args:
        engine_or_optimizer: a DeepSpeed engine, one of our optimizers, or a wrapper of one.

    Raises:
        TypeError: there is no optimizer of ours inside.
        RuntimeError: nothing was measured yet, or ``gamma=1``.
    """
    layers: dict[str, LayerGSNR] = {}
    measured = _measured(engine_or_optimizer)
    for part in measured:
        rows = torch.stack([part.mean_ratio, part.clamped_low, part.clamped_high], 1).tolist()
        yardsticks = zip(part.table.layers, part.gamma.tolist(), strict=True)
        noise = [clamped_by_noise(part.k // layer.share, gamma) or () for layer, gamma in yardsticks]
        layers |= {part.table.names[index]: LayerGSNR(*rows[index], *noise[index]) for index in part.measured}
    return GSNRStatistics(measured[-1].k, layers)


def rank_report(engine_or_optimizer: Any) -> RankReport:
    """Return the ranks' gradients of the last step side by side, the same on all ranks of a node. Not a collective.

    Args:
        engine_or_optimizer: a DeepSpeed engine, one of our optimizers, or a wrapper of one.

    Raises:
        TypeError: there is no optimizer of ours inside.
        RuntimeError: nothing was compared yet, or ``watch`` is None.
    """
    optimizer = find_optimizer(engine_or_optimizer)
    if optimizer.recorder is None or optimizer.recorder.report is None:
        why = "watch=None compares no ranks" if optimizer.recorder is None else "it has not stepped yet"
        raise RuntimeError(f'{type(optimizer).__name__} has no report on ranks: {why}. Set watch="log", and step')
    return optimizer.recorder.report


class NoiseScaleUnknown(RuntimeError):
    """Experts are spread over ranks, so that no rank knows the whole model's noise scale."""


@dataclass(frozen=True)
class GradientNoise:
    """Noise and signal of the last step's gradient, by layer: unbiased estimates (``gsnr.noise_and_signal``)."""

    names: tuple[str, ...]  # of the L layers whose gamma is below 1
    trace: Tensor  # (L,), tr(Sigma), the summed variance of one sample's gradient; on the optimizer's device
    signal: Tensor  # (L,), |G|^2, the squared norm of the expected gradient; may come out negative


def gradient_noise(engine_or_optimizer: Any, chunk_size: float | None = None) -> GradientNoise:
    """Return both parts of the last step's noise scale, the same on all ranks. Neither a collective nor a host sync.

    Loss scale, clipping and accumulation do not enter, and both parts are of single samples: steps may be averaged
    (``ds_vrgd.NoiseScaleMeter``), also where their batch sizes differ. In plain PyTorch the loss scale is not known;
    every micro-batch's loss is taken to be divided by the number of micro-batches. Arguments and errors are those of
    :func:`noise_scale`.
    """
    if chunk_size is None:
        micro_batch = getattr(engine_or_optimizer, "train_micro_batch_size_per_gpu", None)
        if micro_batch is None:
            raise ValueError(
                "chunk_size=None: give the samples of one micro-batch, or a DeepSpeed engine, which knows them"
            )
        chunk_size = float(micro_batch())
    _require_positive(chunk_size)
    parts = _measured(engine_or_optimizer)
    if any(layer.share > 1 for part in parts for layer in part.table.layers):
        raise NoiseScaleUnknown(
            "the noise scale of a model with an expert-parallel size above 1 is not known: each rank holds other "
            "experts, and no rank holds the whole model. gsnr_stats() has the layers one by one"
        )
    square, variance = torch.cat([torch.stack([part.square, part.variance])[:, part.measured] for part in parts], 1)
    trace, signal = gsnr.noise_and_signal(square, variance, parts[-1].k, chunk_size)
    return GradientNoise(tuple(part.table.names[index] for part in parts for index in part.measured), trace, signal)


def _require_positive(chunk_size: float) -> None:
    if not 0.0 < chunk_size < math.inf:
        raise ValueError(f"chunk_size={chunk_size!r} is out of range: must be a finite number > 0")


def noise_scale(engine_or_optimizer: Any, chunk_size: float | None = None) -> float:
    """Return the simple gradient noise scale of the last step, in samples; the same on all ranks.

    It is ``tr(Sigma) / |G|^2`` (McCandlish et al. 2018, equation 2.9), over all layers whose gamma is below 1. The
    estimate of a single step is itself noisy, and is infinite or negative where the mean is lost in the noise:
    ``ds_vrgd.NoiseScaleMeter`` averages over steps, with an interval.

    Args:
        engine_or_optimizer: a DeepSpeed engine, one of our optimizers, or a wrapper of one.
        chunk_size: samples in one micro-batch on one rank; a DeepSpeed engine knows it.

    Raises:
        TypeError: there is no optimizer of ours inside.
        ValueError: the size of a chunk is not known, or not positive.
        NoiseScaleUnknown: experts are spread over ranks.
        RuntimeError: nothing was measured yet, or ``gamma=1``.
    """
    noise = gradient_noise(engine_or_optimizer, chunk_size)
    return float(noise.trace.sum() / noise.signal.sum())


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
    """A meter's estimate, over all layers and layer by layer.

    Attributes:
        confidence: of the intervals.
        steps: number of steps counted.
        layers: by parameter name.
    """

    confidence: float
    steps: int
    layers: dict[str, NoiseScale]


class RatioOfMeans:
    """Ratios of two running means, one per column, with their intervals: all on one device, without a host sync.

    A value ``n`` steps old weighs ``decay**n``. Steps are taken to be independent, as the noise of different batches
    is. A drift of the means widens the interval: it is for the averages, not for the newest step.

    Args:
        decay: in (0, 1]; 1 weighs all steps alike.
        sums: ``(7, C)`` of an earlier instance, which this one continues.
    """

    def __init__(self, decay: float, sums: Tensor | None = None) -> None:
        self.decay = decay
        self.sums = torch.zeros(_ROWS, 0, dtype=torch.float64) if sums is None else sums

    def add(self, top: Tensor, bottom: Tensor) -> None:
        """Count one step.

        Args:
            top, bottom: ``(C,)``. ``C`` may grow from call to call: further columns are new. NaN leaves a column as it
                is, without this step.
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
        squares = self.decay**2 * squares + 1.0
        spreads = self.decay * spreads + before / weight * products
        updated = torch.cat([weight, squares, means + change / weight, spreads])
        self.sums = torch.where(values.isnan().any(0), self.sums, updated)

    def intervals(self, confidence: float, longer: float = 1.0) -> Tensor:
        """Return ratio, low and high of each column, ``(3, C)``.

        Fieller's set holds all ratios B for which ``mean(top) - B mean(bottom)`` is not told from 0 by the t statistic
        with the degrees of freedom of the weights, ``(sum w)^2 / sum w^2 - 1``. Its positive part has no upper end
        where ``mean(bottom)`` itself is not told from 0.

        Args:
            confidence: of the interval, in (0, 1).
            longer: predict the intervals of ``longer`` times the steps, with the same means and spread.
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
    """Averages the gradient noise scale over the steps, for the whole model and by layer.

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
            _require_positive(chunk_size)
        self._confidence, self._chunk_size = confidence, chunk_size
        self._means = RatioOfMeans(decay)
        self._columns: dict[str, int] = {}  # of the layers; column 0 is the whole model
        self._steps = 0
        self._last: Tensor | None = None

    def update(self, engine_or_optimizer: Any, chunk_size: float | None = None) -> bool:
        """Count the step that was just taken.

        Args:
            engine_or_optimizer: a DeepSpeed engine, one of our optimizers, or a wrapper of one.
            chunk_size: of this step; None for the meter's.

        Returns:
            Whether there was one: False where nothing was measured since the last update, because the step was skipped
            or an accumulation is not complete.

        Raises:
            TypeError, ValueError, NoiseScaleUnknown: as ``ds_vrgd.noise_scale``.
        """
        measured = find_optimizer(engine_or_optimizer).layer_statistics
        if not measured or measured[0].square is self._last:
            return False
        noise = gradient_noise(engine_or_optimizer, self._chunk_size if chunk_size is None else chunk_size)
        self._last = measured[0].square
        for name in noise.names:
            self._columns.setdefault(name, 1 + len(self._columns))
        values = torch.stack([noise.trace, noise.signal])
        values = torch.cat([values.sum(1, keepdim=True), values], 1)
        if noise.names != tuple(self._columns):  # some layers had no gradient, or they come in another order
            columns = torch.tensor([0, *map(self._columns.__getitem__, noise.names)], device=values.device)
            values = values.new_full((2, 1 + len(self._columns)), math.nan).index_copy(1, columns, values)
        self._means.add(*values)
        self._steps += 1
        return True

    def estimate(self) -> NoiseScaleEstimate:
        """Return the noise scale over the steps so far.

        Raises:
            RuntimeError: no step was counted.
        """
        if not self._steps:
            raise RuntimeError(
                "NoiseScaleMeter has counted no step: call update(engine) after each step of an optimizer of ds_vrgd "
                "with gamma < 1"
            )
        (value, low, high), *layers = self._means.intervals(self._confidence).T.tolist()
        of_layers = {name: NoiseScale(*row) for name, row in zip(self._columns, layers, strict=True)}
        return NoiseScaleEstimate(value, low, high, self._confidence, self._steps, of_layers)

    def state_dict(self) -> dict[str, Any]:
        """Return all that was counted, in plain Python, so that JSON keeps it bit for bit."""
        return {"steps": self._steps, "layers": list(self._columns), "sums": self._means.sums.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a :meth:`state_dict`.

        Raises:
            ValueError: it is none.
        """
        sums = torch.tensor(state.get("sums", ()), dtype=torch.float64)
        columns = 1 + len(state.get("layers", ())) if state.get("steps") else 0
        if state.keys() != {"steps", "layers", "sums"} or sums.shape != (_ROWS, columns):
            raise ValueError(
                f"not a state of a NoiseScaleMeter: it has the keys {[*state]}, and sums of shape {[*sums.shape]}"
            )
        self._steps = int(state["steps"])
        self._columns = {name: column for column, name in enumerate(state["layers"], start=1)}
        self._means = RatioOfMeans(self._means.decay, sums)


def _student(freedom: Tensor, confidence: float) -> Tensor:
    """Return the two-sided quantile of Student's t (Abramowitz and Stegun, 26.7.5, expanded to the third order)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    n = freedom.clamp(min=1.0)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3
