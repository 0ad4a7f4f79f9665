"""Does the batch-size meter name the batch beyond which an example is worth less? Handwritten digits, an MLP.

For every batch, the updates to a training loss at the best of many rates, drawn with replacement; beside it, what
``ds_vrgd.NoiseScaleMeter`` says on the way to the same loss. By McCandlish et al. (2018), eq. 2.11, a batch B needs
E_min (1 + B / B_crit) examples, and B_crit should be the noise scale.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.noise import gradient_noise
from ds_vrgd_recipes.run.fetching import fetch, pip, read_archive
from evidence.experiment import FULL, Experiment, Row
from evidence.meter_report import draw, tables

HIDDEN, CLASSES = 64, 10
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
RATES = {"SGD": (0.03, 16), "Adam": (5e-4, 14)}  # the least, and how many, each sqrt(2) times the one before
#: Of the measurements, at a batch of 64: about its best rate, a half and a quarter of it.
MEASURED_RATES = {"SGD": (1.0, 0.5, 0.25), "Adam": (0.03, 0.015, 0.0075)}
MOST_EXAMPLES, FEWEST_UPDATES = 400_000, 600
LONGER = 1.5  # than the first rate that reaches the target: the others' time
CHUNKS = 8
ALMOST_1 = 0.999999  # of gamma: the step of the base optimizer, and its noise is measured all the same

#: The digits that scikit-learn brings along: 1,797 images of 8 x 8 (UCI "Optical Recognition of Handwritten Digits").
DIGITS = pip(
    "scikit-learn==1.7.2",
    "scikit_learn-1.7.2-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    "89877e19a80c7b11a2891a27c21c4894fb18e2c2e077815bcade10d34287b20d",
    "--only-binary=:all:", "--platform", "manylinux2014_x86_64", "--python-version", "3.11",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Attributes:
    kind: "train" with every rate, or "measure" the noise scale at one.
    optimizer: SGD or Adam.
    batch: samples in an update.
    target: the training loss to be reached, in nats, over all digits.
    rate: of the measurement; None where every rate is tried.
    """

    kind: str
    optimizer: str
    batch: int
    seed: int
    target: float
    rate: float | None = None


def settings(size: str) -> list[Setting]:
    """The measurements, then every batch."""
    seeds, targets = (8, (0.3, 0.1, 0.03)) if size == FULL else (3, (0.1,))
    found = []
    for target in targets:
        measured = [(optimizer, rate) for optimizer, of in MEASURED_RATES.items() for rate in of]
        found += [Setting("measure", name, 64, seed, target, rate) for name, rate in measured for seed in range(seeds)]
        trained = [(name, batch) for batch in BATCHES for name in RATES]
        found += [Setting("train", name, batch, seed, target) for name, batch in trained for seed in range(seeds)]
    return found


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images ``(1797, 64)`` from 0 to 1, and classes."""
    path = fetch("the digits of evidence.meter", DIGITS, "leave this experiment out").path
    ((_, content),) = read_archive(path, r"sklearn/datasets/data/digits\.csv\.gz")
    rows = torch.tensor([[float(value) for value in line.split(",")] for line in content.decode().split()])
    return rows[:, :-1] / 16.0, rows[:, -1].long()


def rates(optimizer: str) -> list[float]:
    """Those that are tried."""
    least, count = RATES[optimizer]
    return [least * 2.0 ** (place / 2) for place in range(count)]


def start(seed: int) -> nn.Sequential:
    """The network, one hidden layer, before its first update."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))


def drawn(setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of digits, drawn with replacement."""
    images, classes = digits()
    generator = torch.Generator().manual_seed(setting.seed)
    while True:
        places = torch.randint(len(images), (setting.batch,), generator=generator)
        yield images[places], classes[places]


def losses(weights: list[Tensor], images: Tensor, classes: Tensor) -> Tensor:
    """``(runs,)``: of networks side by side."""
    first, first_bias, second, second_bias = weights
    hidden = torch.tanh(images @ first.transpose(1, 2) + first_bias[:, None])
    logits = hidden @ second.transpose(1, 2) + second_bias[:, None]
    targets = classes.expand(len(logits), -1)
    return nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


def train(setting: Setting) -> Row:
    """All rates side by side, on the same batches.

    Returns:
        ``reached``: the updates of each rate to the target, in steps of 2 %; null where it took much longer than the
        fastest.
    """
    of_rates = torch.tensor(rates(setting.optimizer))
    weights = [
        param.detach().expand(len(of_rates), *param.shape).clone().requires_grad_()
        for param in start(setting.seed).parameters()
    ]
    update = _sgd(of_rates) if setting.optimizer == "SGD" else _adam(of_rates, weights)
    reached: list[int | None] = [None] * len(of_rates)
    recent = torch.full((len(of_rates),), math.log(CLASSES))
    most, look = max(MOST_EXAMPLES // setting.batch, FEWEST_UPDATES), 1.0
    for step, batch in enumerate(drawn(setting), start=1):
        found = losses(weights, *batch)
        grads = torch.autograd.grad(found.sum(), weights)
        with torch.no_grad():
            update(weights, grads, step)
            recent.lerp_(found, 0.1)
            if step >= look and recent.nan_to_num(math.inf).min() < 2.0 * setting.target:
                look = step * 1.02
                for place, loss in enumerate(losses(weights, *digits()).tolist()):
                    if reached[place] is None and loss <= setting.target:
                        reached[place] = step
                        most = min(most, math.ceil(LONGER * step))
        if step >= most:
            return {"reached": reached}
    raise AssertionError("batches are drawn without end")


Update = Callable[[list[Tensor], tuple[Tensor, ...], int], None]


def _sgd(of_rates: Tensor) -> Update:
    def update(weights: list[Tensor], grads: tuple[Tensor, ...], step: int) -> None:
        for weight, grad in zip(weights, grads, strict=True):
            weight -= of_rates.view(-1, *[1] * (grad.dim() - 1)) * grad

    return update


def _adam(of_rates: Tensor, weights: list[Tensor]) -> Update:
    first, second = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))

    def update(weights: list[Tensor], grads: tuple[Tensor, ...], step: int) -> None:
        for weight, grad, m, v in zip(weights, grads, first, second, strict=True):
            m.lerp_(grad, 0.1)
            v.lerp_(grad.square(), 0.001)
            direction = m / (1.0 - 0.9**step) / ((v / (1.0 - 0.999**step)).sqrt() + 1e-8)
            weight -= of_rates.view(-1, *[1] * (grad.dim() - 1)) * direction

    return update


def measure_noise(setting: Setting) -> Row:
    """Train to the target with a meter beside it.

    Returns:
        ``scale``, ``low``, ``high``: over the whole way; ``quarters``: the noise scale in each quarter of it, null
        where the signal is lost in the noise; ``updates``: their number.
    """
    assert setting.rate is not None
    model, size = start(setting.seed), setting.batch / CHUNKS
    made = {"SGD": ds_vrgd.VRSGD, "Adam": ds_vrgd.VRAdam}[setting.optimizer]
    optimizer = made(list(model.named_parameters()), lr=setting.rate, gamma=ALMOST_1)
    images, classes = digits()
    meter = ds_vrgd.NoiseScaleMeter(decay=1.0, chunk_size=size)
    noise: list[tuple[float, float]] = []
    for x, y in drawn(setting):
        for chunk, of_chunk in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
            (nn.functional.cross_entropy(model(chunk), of_chunk) / CHUNKS).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.update(optimizer)
        found = gradient_noise(optimizer, size)
        noise.append((float(found.trace.sum()), float(found.signal.sum())))
        with torch.no_grad():
            loss = float(nn.functional.cross_entropy(model(images), classes))
        if loss <= setting.target:
            break
        if len(noise) * setting.batch >= MOST_EXAMPLES:
            raise RuntimeError(f"a loss of {setting.target} was not reached: it is {loss}")
    quarters = []
    for quarter in range(4):
        part = noise[len(noise) * quarter // 4 : len(noise) * (quarter + 1) // 4]
        trace, signal = (statistics.fmean(column) for column in zip(*part, strict=True))
        quarters.append(trace / signal if signal > 0 else None)
    whole = meter.estimate()
    return {"updates": len(noise), "scale": whole.value, "low": whole.low, "high": whole.high, "quarters": quarters}


def measure(setting: Setting) -> Row:
    """One of the two kinds."""
    return train(setting) if setting.kind == "train" else measure_noise(setting)


EXPERIMENT = Experiment(
    "The batch-size meter, checked",
    settings,
    measure,
    lambda rows: tables(rows, rates),
    lambda figure, rows: draw(figure, rows, rates),
    (10.0, 4.2),
)
