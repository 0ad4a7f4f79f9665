"""Linear regression with VR-SGD (sections 7.2 and 7.3, figures 1 and 3): the plane of rate, gamma and k.

Weights 1 to 10, zero start, 100 steps of 2,048 fresh inputs, cut into k chunks. A setting runs all rates and gammas at
once, with the pure functions of ``ds_vrgd.gsnr``; a test holds them to the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_vrgd import gsnr
from evidence.experiment import FULL, Experiment, Row
from evidence.linear_report import draw, tables

WEIGHTS, BATCH, STEPS = 10, 2048, 100
GAMMAS = (0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 0.7, 1.0)  # the last is SGD
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
K, GAMMA = 64, 0.1  # those whose trajectories are kept
DTYPE = torch.float64
WINDOW = 10  # steps that a loss is the mean over: in SGD's oscillating range single steps differ
SETTLED = 0.5
LIMIT = 2.0 / (2.0 * (1 / 12 + WEIGHTS / 4))  # SGD's with uniform inputs and squared error: 2 / largest eigenvalue


@dataclass(frozen=True)
class Setting:
    """Attributes:
    inputs: uniform on [0, 1], uniform on [-1, 1] ("centred"), or standard normal.
    loss: of a chunk of b samples: "norm" is the 2-norm of its residuals, "rms" that over sqrt(b), "squared" their
        mean square. The loss of a batch is the mean over its chunks.
    schedule: of the rate: constant, or falling linearly to zero.
    rates: how many of the loss's range.
    """

    inputs: str
    loss: str
    schedule: str
    k: int
    seed: int
    rates: int


def settings(size: str) -> list[Setting]:
    """The paper's case at every k; then other inputs, and a rate that falls."""
    seeds, rates = (10, 26) if size == FULL else (3, 13)
    cases = [("uniform", loss, "constant", k) for k in CHUNKS for loss in ("rms", "norm", "squared")]
    cases += [("uniform", loss, "linear", k) for k in (8, K) for loss in ("rms", "norm", "squared")]
    cases += [(inputs, loss, "constant", K) for inputs in ("centred", "normal") for loss in ("rms", "norm", "squared")]
    return [Setting(*case, seed, rates) for case in cases for seed in range(seeds)]


def rates_of(loss: str, count: int) -> Tensor:
    """From far too small to far too large, ``(count,)``; the norm of a chunk of 32 is 5.7 times its rms."""
    if loss == "squared":
        # Twice as many, for what counts is near the limit; 0.98 of it is one.
        return torch.arange(1, 2 * count + 1, dtype=DTYPE) / (2 * count) * 1.82 * LIMIT
    high = torch.logspace(-1.0, 0.5, count, dtype=DTYPE)
    return high / math.sqrt(BATCH / K) if loss == "norm" else high


def draw_inputs(kind: str, generator: torch.Generator) -> Tensor:
    """A batch, ``(BATCH, WEIGHTS)``."""
    if kind == "normal":
        return torch.randn(BATCH, WEIGHTS, dtype=DTYPE, generator=generator)
    uniform = torch.rand(BATCH, WEIGHTS, dtype=DTYPE, generator=generator)
    return 2.0 * uniform - 1.0 if kind == "centred" else uniform


def chunk_gradients(inputs: Tensor, residuals: Tensor, loss: str, k: int) -> Tensor:
    """Of the loss of every chunk, ``(k, runs, WEIGHTS)``, from ``(BATCH, WEIGHTS)`` and ``(BATCH, runs)``."""
    size = BATCH // k
    chunks = residuals.view(k, size, -1)
    gradients = chunks.transpose(1, 2) @ inputs.view(k, size, WEIGHTS)
    if loss == "squared":
        return gradients * (2.0 / size)
    norms = torch.linalg.vector_norm(chunks, dim=1).unsqueeze(2)
    gradients = gradients / norms.masked_fill(norms == 0, 1.0)
    return gradients / math.sqrt(size) if loss == "rms" else gradients


def train(setting: Setting, rates: Tensor, gammas: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Every step's (root mean square test error, weights, ratio), of shapes ``(runs,)`` and ``(runs, WEIGHTS)``.

    Args:
        rates, gammas: of the runs, ``(runs,)``.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    true = torch.arange(1, WEIGHTS + 1, dtype=DTYPE)
    test = draw_inputs(setting.inputs, generator)
    weights = torch.zeros(len(rates), WEIGHTS, dtype=DTYPE)
    floor = gammas[:, None]
    for step in range(STEPS):
        inputs = draw_inputs(setting.inputs, generator)
        gradients = chunk_gradients(inputs, inputs @ (weights - true).T, setting.loss, setting.k)
        mean = gradients.mean(0)
        raw = gsnr.raw_ratio(mean, (gradients - mean).square().sum(0), setting.k, gsnr_eps=1e-6)
        ratio = gsnr.normalized_ratio(raw, raw.mean(1, keepdim=True)).clamp(max=1.0).maximum(floor)
        falling = 1.0 - step / STEPS if setting.schedule == "linear" else 1.0
        weights = weights - falling * rates[:, None] * ratio * mean
        yield (test @ (weights - true).T).square().mean(0).sqrt(), weights, ratio


def measure(setting: Setting) -> Row:
    """Lists over gammas, then rates.

    Returns:
        ``final``: test error, mean of the last 10 steps. ``reached``: the first step at which the mean of 10 steps is
        within 1 % of SGD's ``final`` at the same rate, or null. And for k = 64, of gamma 0.1 and of SGD: ``curve``, the
        errors of all steps; ``settled``, for each weight the step from which it stays within 0.5 of the truth, or null;
        ``ratio``, of gamma 0.1, the mean over each tenth of the run.
    """
    rates = rates_of(setting.loss, setting.rates)
    shape = (len(GAMMAS), len(rates))
    gammas = torch.tensor(GAMMAS, dtype=DTYPE)[:, None].expand(shape).flatten()
    steps = [torch.stack(each) for each in zip(*train(setting, rates.repeat(len(GAMMAS)), gammas), strict=True)]
    errors, weights, ratios = (each.unflatten(1, shape) for each in steps)
    means = errors.unfold(0, WINDOW, 1).mean(-1)
    final = means[-1]
    within = means <= 1.01 * final[-1]
    row: Row = {
        "grid": _rounded(rates),
        "final": _rounded(final),
        "reached": _first(within, WINDOW),
    }
    if setting.k == K:
        kept = [GAMMAS.index(GAMMA), len(GAMMAS) - 1]
        off = (weights[:, kept] - torch.arange(1, WEIGHTS + 1)).abs() > SETTLED
        row["curve"] = _rounded(errors[:, kept].movedim(0, -1))
        row["settled"] = _first(off.flip(0).cumsum(0).flip(0) == 0, 1)
        row["ratio"] = _rounded(ratios[:, kept[0]].unflatten(0, (10, STEPS // 10)).mean(1).movedim(0, 1))
    return row


def _first(holds: Tensor, offset: int) -> object:
    """Along the first dimension the first place where ``holds``, counted from ``offset``, or None, as lists."""
    found = torch.where(holds.any(0), holds.int().argmax(0) + offset, 0)

    def listed(values: object) -> object:
        return [listed(value) for value in values] if isinstance(values, list) else values or None

    return listed(found.tolist())


def _rounded(values: Tensor) -> object:
    """Lists of numbers of four digits."""

    def listed(value: object) -> object:
        return [listed(each) for each in value] if isinstance(value, list) else float(f"{value:.4g}")

    return listed(values.tolist())


EXPERIMENT = Experiment(
    "Linear regression: SGD and VR-SGD",
    settings,
    measure,
    tables=lambda rows: tables(rows, GAMMAS, K, GAMMA),
    draw=lambda figure, rows: draw(figure, rows, GAMMAS, K, GAMMA),
    figure_size=(12.0, 7.0),
)
