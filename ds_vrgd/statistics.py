"""Reading what the last step measured: GSNR layer by layer, and the gradient noise scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_vrgd import gsnr
from ds_vrgd.optim import LayerStatistics, VROptimizer, arguments


@dataclass(frozen=True)
class LayerGSNR:
    """One layer's GSNR at the last step.

    Attributes:
        mean_ratio: mean over the layer of the raw ratio (equation 2), before it is normalised.
        clamped_low: fraction of the elements whose normalised ratio was raised to gamma.
        clamped_high: fraction whose normalised ratio was lowered to 1.
    """

    mean_ratio: float
    clamped_low: float
    clamped_high: float


@dataclass(frozen=True)
class GSNRStatistics:
    """What the last optimizer step saw.

    Attributes:
        k: number of chunks: data-parallel ranks x micro-batches.
        layers: by parameter name.
    """

    k: int
    layers: dict[str, LayerGSNR]

    def means(self) -> LayerGSNR:
        """Over the layers, whatever their size."""
        layers = self.layers.values()
        columns = zip(*((layer.mean_ratio, layer.clamped_low, layer.clamped_high) for layer in layers), strict=True)
        return LayerGSNR(*(sum(column) / len(layers) for column in columns))


def find_optimizer(engine_or_optimizer: Any) -> VROptimizer:
    """Our optimizer inside an engine, a wrapper, or itself.

    Raises:
        TypeError: there is none.
    """
    seen: Any = engine_or_optimizer
    while seen is not None and not isinstance(seen, VROptimizer):
        seen = getattr(seen, "basic_optimizer", None) or getattr(seen, "optimizer", None)
    if seen is None:
        raise TypeError(f"{type(engine_or_optimizer).__name__} holds no optimizer of ds_vrgd")
    return seen


def _measured(engine_or_optimizer: Any) -> list[LayerStatistics]:
    optimizer = find_optimizer(engine_or_optimizer)
    measured = list(optimizer.layer_statistics)
    if not measured:
        raise RuntimeError(
            f"{type(optimizer).__name__} has measured no GSNR: either it has not stepped yet, or gamma=1.0 turns GSNR "
            "off"
        )
    return measured


def gsnr_stats(engine_or_optimizer: Any) -> GSNRStatistics:
    """GSNR of every layer at the last step, the same on all ranks. Not a collective.

    With expert parallelism a rank has the experts that it holds, numbered over all ranks; k is all other layers'.

    Args:
        engine_or_optimizer: a DeepSpeed engine, or one of our optimizers, or what wraps it.

    Raises:
        TypeError: there is no optimizer of ours inside.
        RuntimeError: nothing was measured yet, or ``gamma=1``.
    """
    layers: dict[str, LayerGSNR] = {}
    measured = _measured(engine_or_optimizer)
    for part in measured:
        assert part.clamped_low is not None
        assert part.clamped_high is not None
        rows = zip(part.mean_ratio.tolist(), part.clamped_low.tolist(), part.clamped_high.tolist(), strict=True)
        layers |= {name: LayerGSNR(*row) for name, row in zip(part.table.names, rows, strict=True)}
    return GSNRStatistics(measured[-1].k, layers)


class NoiseScaleUnknown(RuntimeError):
    """Experts are spread over ranks, so that no rank knows the whole model's noise scale."""


@dataclass(frozen=True)
class GradientNoise:
    """Noise and signal of the last step's gradient, by layer: unbiased estimates (``gsnr.noise_and_signal``).

    Attributes:
        names: of the layers whose gamma is below 1, ``L`` of them.
        trace: ``(L,)``, ``tr(Sigma)``, the summed variance of one sample's gradient; on the optimizer's device.
        signal: ``(L,)``, ``|G|^2``, the squared norm of the expected gradient; may come out negative.
    """

    names: tuple[str, ...]
    trace: Tensor
    signal: Tensor


def gradient_noise(engine_or_optimizer: Any, chunk_size: float | None = None) -> GradientNoise:
    """What the noise scale of the last step is made of; the same on all ranks. Neither a collective nor a host sync.

    Loss scale, clipping and accumulation do not enter, so steps may be averaged (``ds_vrgd.NoiseScaleMeter``), also
    those of other batch sizes: both are of single samples. In plain PyTorch a loss scale is not known, and every
    micro-batch's loss is taken to be divided by the number of micro-batches.

    Args:
        engine_or_optimizer: a DeepSpeed engine, or one of our optimizers, or what wraps it.
        chunk_size: samples in one micro-batch on one rank; a DeepSpeed engine knows it.

    Raises:
        TypeError: there is no optimizer of ours inside.
        ValueError: the size of a chunk is not known, or not positive.
        NoiseScaleUnknown: experts are spread over ranks.
        RuntimeError: nothing was measured yet, or ``gamma=1``.
    """
    parts, k, chunk_size = _noise_parts(engine_or_optimizer, chunk_size)
    square, variance = (torch.cat(column) for column in zip(*((p.square, p.variance) for p in parts), strict=True))
    trace, signal = gsnr.noise_and_signal(square, variance, k, chunk_size)
    return GradientNoise(tuple(name for part in parts for name in part.table.names), trace, signal)


def _noise_parts(engine_or_optimizer: Any, chunk_size: float | None) -> tuple[list[LayerStatistics], int, float]:
    """What was measured, k and the size of a chunk, checked as :func:`gradient_noise` says."""
    if chunk_size is None:
        micro_batch = getattr(engine_or_optimizer, "train_micro_batch_size_per_gpu", None)
        if micro_batch is None:
            raise ValueError(
                "chunk_size=None: give the samples of one micro-batch, or a DeepSpeed engine, which knows them"
            )
        chunk_size = micro_batch()
    arguments.above("chunk_size", chunk_size, 0.0)
    measured = _measured(engine_or_optimizer)
    if any(layer.share > 1 for part in measured for layout in part.table.layouts for layer in layout.layers):
        raise NoiseScaleUnknown(
            "the noise scale of a model with an expert-parallel size above 1 is not known: each rank holds other "
            "experts, and no one the whole model. gsnr_stats() has the layers one by one"
        )
    return measured, measured[-1].k, chunk_size


def noise_scale(engine_or_optimizer: Any, chunk_size: float | None = None) -> float:
    """Simple gradient noise scale of the last step, in samples (McCandlish et al. 2018); the same on all ranks.

    Over all layers whose gamma is below 1. One step's estimate is itself noisy, and is infinite or negative where
    the mean is lost in the noise: ``ds_vrgd.NoiseScaleMeter`` averages over steps and gives an interval.

    Args:
        engine_or_optimizer: a DeepSpeed engine, or one of our optimizers, or what wraps it.
        chunk_size: samples in one micro-batch on one rank; a DeepSpeed engine knows it.

    Raises:
        TypeError: there is no optimizer of ours inside.
        ValueError: the size of a chunk is not known, or not positive.
        NoiseScaleUnknown: experts are spread over ranks.
        RuntimeError: nothing was measured yet, or ``gamma=1``.
    """
    parts, k, chunk_size = _noise_parts(engine_or_optimizer, chunk_size)
    square = torch.stack([part.square.sum() for part in parts]).sum()
    variance = torch.stack([part.variance.sum() for part in parts]).sum()
    return float(gsnr.noise_scale(square, variance, k, chunk_size))
