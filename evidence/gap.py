"""Generalisation: one step's ratio against the GSNR that predicts it (equation 5), the gap after training (table 3).

Images of clothes (Fashion-MNIST) and small networks, so that expectations over training sets can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import ds_vrgd
from benchmarks.ranks import device_type
from ds_vrgd import gsnr
from ds_vrgd.optim.observer import Shard
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.vision.images import fashion_mnist
from evidence.experiment import FULL, Experiment, Row
from evidence.gap_report import KINDS, draw, tables

GAMMA = 0.1
PAIRS = {"Momentum": "VRMomentum", "LARS": "VRLARS"}
CURVE = 10  # evaluations of a training
OTHERS = 4096  # fresh images on which a step's other change is measured, drawn anew every time


@dataclass(frozen=True)
class Step:
    """One small step on n samples, from weights that have been trained on ``seen`` other ones.

    Attributes:
        epochs: of that training.
        source: of the n samples: "fresh", or "seen", those that the weights have been trained on.
        draws: of n samples, over which the losses' changes are averaged.
        warm_up: draws before them, at least 1, from which the ratios of other samples come.
        beta3: decay of the running mean of the ratio.
    """

    network: str
    seen: int
    epochs: int
    source: str
    n: int
    k: int
    rate: float
    draws: int
    seed: int
    warm_up: int = 30  # after which the newest draw's weight in the mean, 0.1 / (1 - 0.9^t), is within 4 % of its limit
    beta3: float = 0.9  # the default of VRAdam and VRLAMB
    part: str = "step"


@dataclass(frozen=True)
class Gap:
    """A whole training with large batches, of ``k`` chunks."""

    network: str
    images: int
    batch: int
    k: int
    epochs: int
    optimizer: str
    rate: float
    seed: int
    part: str = "gap"


def settings(size: str) -> list[Step | Gap]:
    """First the steps."""
    full = size == FULL
    network, images = ("cnn", 60_000) if full else ("mlp", 4000)
    steps = [
        Step(network, 8000, epochs, source, n=512, k=32, rate=1e-4, draws=64 if full else 24, seed=seed)
        for source, epochs in (("fresh", 0), ("fresh", 1), ("fresh", 30), ("seen", 1), ("seen", 30))
        for seed in range(3)
    ]
    batch, k, epochs = (8192, 32, 60) if full else (1000, 10, 60)
    rates = {"Momentum": (0.2, 0.4, 0.1, 0.8), "LARS": (10.0, 20.0, 5.0, 40.0, 80.0)}
    if full:  # this network comes apart at 0.4 and at 20
        rates = {"Momentum": (0.2, 0.4, 0.1, 0.05), "LARS": (10.0, 20.0, 5.0, 2.5)}
    gaps = [
        Gap(network, images, batch, k, epochs, name, rate, seed)
        for base in PAIRS
        for rate in rates[base]
        for seed in range(3)
        for name in (base, PAIRS[base])
    ]
    return [*steps, *gaps]


@lru_cache(maxsize=1)
def data() -> dict[str, tuple[Tensor, Tensor]]:
    """Pixels about zero, ``(n, 1, 28, 28)``, and classes ``(n,)``, of "train" and "test", on the device."""
    device, images = torch.device(device_type()), fashion_mnist()

    def ready(part: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (part[:, :1, 2:-2, 2:-2].float() / 255.0 - 0.286).to(device) / 0.353, labels.to(device)

    return {
        "train": ready(images.train.images, images.train.labels),
        "test": ready(images.held_out.images, images.held_out.labels),
    }


def build(network: str, seed: int) -> nn.Module:
    """A perceptron on 14 x 14 pixels, or a small convolutional network; without dropout or normalisation."""
    torch.manual_seed(seed)
    if network == "mlp":
        net = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10))
    else:
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        body = [layer for each in convolutions for layer in (each, nn.ReLU(), nn.MaxPool2d(2))]
        net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10))
    return net.to(device_type())


def chunks_of_epoch(count: int, batch: int, chunk: int, generator: torch.Generator) -> Iterator[Sequence[Tensor]]:
    """Whole batches of a new random order, each in chunks of places."""
    order = torch.randperm(count, generator=generator).to(device_type())
    for first in range(0, count - batch + 1, batch):
        yield order[first : first + batch].split(chunk)


@lru_cache(maxsize=8)
def trained(network: str, seen: int, epochs: int, seed: int) -> dict[str, Tensor]:
    """Weights after training on the first images with plain SGD, in fp64."""
    model, generator = build(network, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = data()["train"]
    for _ in range(epochs):
        for (places,) in chunks_of_epoch(seen, 100, 100, generator):
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs[places]), labels[places]).backward()
            optimizer.step()
    return {name: param.detach().double() for name, param in model.named_parameters()}


def measure(setting: Step | Gap) -> Row:
    """See ``measure_step`` and ``measure_gap``."""
    return measure_step(setting) if isinstance(setting, Step) else measure_gap(setting)


def measure_step(setting: Step) -> Row:
    """The changes of the losses over one step, means over the draws, and what the GSNR says of their ratio.

    With first-order steps, of which equation 5 is the limit, the expected ratio of the changes on other samples and on
    the n samples themselves is ``1 - sum_j W_j (1/n) / (r_j + 1/n)``, with r_j of single samples and W_j the share of
    weight j in the loss's change. A chunk of b samples has b times a sample's r_j.

    The weights stand still: every draw is made at the same ones. In training they move, and an average over steps holds
    ratios of earlier weights.

    Returns:
        For "sgd", "vr" (VR-SGD, gamma 0.1), "independent" (VR-SGD whose ratio comes from another n samples) and
        "averaged" (whose ratio is the debiased running mean over the draws so far, this one's own included, which is
        how VRAdam and VRLAMB scale the gradient that they take; their moments and trust ratios are left out):
        ``NAME_measured``; ``NAME_predicted``, equation 5 with r_j as it is measured, squared mean over variance; and
        ``NAME_unbiased``, with the squared mean freed of its expected noise, over all weights together. Each is a
        quotient of means over the draws, the same draws for all of them.
    """
    weights = trained(setting.network, setting.seen, setting.epochs, setting.seed)
    model = build(setting.network, setting.seed).double()
    generator = torch.Generator().manual_seed(1000 + setting.seed)
    inputs, labels = data()["train"]
    fresh = torch.arange(setting.seen, len(labels))
    pool = torch.arange(setting.seen) if setting.source == "seen" else fresh
    shards = shards_of(weights, setting.beta3)

    def loss(at: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, at, (images,)), classes)

    def images(places: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[places.to(labels.device)].double(), labels[places.to(labels.device)]

    sums: dict[tuple[str, str], float] = {}
    own_ratio: dict[str, Tensor] = {}
    for draw_number in range(setting.warm_up + setting.draws):
        places = pool[torch.randperm(len(pool), generator=generator)[: setting.n]]
        sample = images(places)
        mean, m2 = moments(loss, weights, sample, setting.k)
        other_ratio, own_ratio = own_ratio, {name: ratio(mean[name], m2[name], setting.k) for name in mean}
        mean_ratio = averaged_ratio(shards, own_ratio)
        if draw_number < setting.warm_up:
            continue
        others = fresh[torch.randperm(len(fresh), generator=generator)]
        test = images(others[~torch.isin(others, places)][:OTHERS])
        with torch.no_grad():
            before = float(loss(weights, *sample)), float(loss(weights, *test))
        one = {name: torch.ones_like(of) for name, of in mean.items()}
        for kind, scale in zip(KINDS, (one, own_ratio, other_ratio, mean_ratio), strict=True):
            step = {name: scale[name] * mean[name] for name in mean}
            moved = {name: weights[name] - setting.rate * step[name] for name in weights}
            with torch.no_grad():
                found = {
                    "train": before[0] - float(loss(moved, *sample)),
                    "test": before[1] - float(loss(moved, *test)),
                    **expected(mean, m2, step, setting.k),
                }
            for key, value in found.items():
                sums[kind, key] = sums.get((kind, key), 0.0) + value
    quotients = {"measured": ("test", "train"), "predicted": ("kept", "all"), "unbiased": ("kept_unbiased", "all")}
    return {
        f"{kind}_{name}": sums[kind, above] / sums[kind, below]
        for kind in KINDS
        for name, (above, below) in quotients.items()
    }


def moments(
    loss: Callable[..., Tensor], weights: dict[str, Tensor], sample: Sequence[Tensor], k: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean and centred sum of squares of the k chunks' gradients."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    chunks = zip(*(tensor.chunk(k) for tensor in sample), strict=True)
    grads = [torch.autograd.grad(loss(leaves, *chunk), list(leaves.values())) for chunk in chunks]
    stacked = {name: torch.stack(of) for name, of in zip(leaves, zip(*grads, strict=True), strict=True)}
    means = {name: of.mean(0) for name, of in stacked.items()}
    return means, {name: (of - means[name]).square().sum(0) for name, of in stacked.items()}


def ratio(mean: Tensor, m2: Tensor, k: int) -> Tensor:
    """Of VR-SGD (equations 2, 8 and 9)."""
    raw = gsnr.raw_ratio(mean, m2, k, gsnr_eps=1e-6)
    return gsnr.clamped_ratio(gsnr.normalized_ratio(raw, raw.mean()), GAMMA)


def shards_of(weights: dict[str, Tensor], beta3: float) -> dict[str, Shard]:
    """What keeps the running means of the weights' ratios, in their own dtype; no draw has been seen yet."""
    group = {"beta3": beta3, "gsnr_dtype": "float32"}
    return {name: Shard(group, of, torch.zeros_like(of), {"step": 0}) for name, of in weights.items()}


def averaged_ratio(shards: dict[str, Shard], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of VRAdam and VRLAMB, by their own function: takes one more draw's ratio into the running means."""
    found: dict[str, Tensor] = {}
    for name, shard in shards.items():
        if begins := "exp_avg_gsnr" not in shard.state:
            shard.state["exp_avg_gsnr"] = shard.new_average()
        shard.state["step"] += 1
        beta3, step = shard.group["beta3"], shard.state["step"]
        p = gsnr.advance_average(shard.state["exp_avg_gsnr"], own[name], beta3, step, 0, begins)
        found[name] = p / (1.0 - beta3**step)
    return found


def expected(mean: dict[str, Tensor], m2: dict[str, Tensor], step: dict[str, Tensor], k: int) -> dict[str, float]:
    """Equation 5 for a step that changes the loss by ``step * mean`` in every weight.

    The variance of the mean of n samples is ``m2 / (k - 1) / k``: that of a chunk's mean over the number of chunks. So
    ``(1/n) / (r_j + 1/n)`` is ``noise / (square + noise)``, where ``square`` is that of the expected gradient; for it
    stands the square of the mean, which is larger by ``noise``.

    Returns:
        ``all``, the change, and what of it other samples keep: ``kept`` with the square of the mean, ``kept_unbiased``
        with that less the noise.
    """
    change = torch.cat([(step[name] * mean[name]).flatten() for name in mean])
    square = torch.cat([of.square().flatten() for of in mean.values()])
    noise = torch.cat([of.flatten() for of in m2.values()]) / (k * (k - 1))
    lost = torch.where(square + noise > 0, noise / (square + noise), 0.0)
    lost_unbiased = torch.where(square > 0, noise / square, 0.0)
    return {
        "all": float(change.sum()),
        "kept": float((change * (1.0 - lost)).sum()),
        "kept_unbiased": float((change * (1.0 - lost_unbiased)).sum()),
    }


def measure_gap(setting: Gap) -> Row:
    """Accuracies in percent while it trains and at its end; with a warm-up, then a rate that falls linearly.

    Returns:
        ``curve``: (epoch, training accuracy, test accuracy); ``train``, ``test``, ``gap`` at the end.
    """
    model, generator = build(setting.network, setting.seed), torch.Generator().manual_seed(setting.seed)
    inputs, labels = (tensor[: setting.images] for tensor in data()["train"])
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]},
              {"params": [p for p in model.parameters() if p.dim() <= 1]}]  # fmt: skip
    if "LARS" in setting.optimizer:
        groups[1] |= {"adapt": False}
    made: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "Momentum": torch.optim.SGD, "VRMomentum": ds_vrgd.VRMomentum, "LARS": ds_vrgd.LARS, "VRLARS": ds_vrgd.VRLARS,
    }  # fmt: skip
    optimizer = made[setting.optimizer](groups, lr=setting.rate, momentum=0.9)
    batches = setting.images // setting.batch
    update, curve = 0, []
    for epoch in range(1, setting.epochs + 1):
        for chunks in chunks_of_epoch(setting.images, setting.batch, setting.batch // setting.k, generator):
            for group in optimizer.param_groups:
                group["lr"] = warmup_polynomial_lr(
                    update,
                    total_steps=batches * setting.epochs,
                    peak_lr=setting.rate,
                    warmup_steps=batches * setting.epochs // 10,
                )
            for places in chunks if setting.optimizer.startswith("VR") else [torch.cat(list(chunks))]:
                loss = functional.cross_entropy(model(inputs[places]), labels[places])
                (loss * (len(places) / setting.batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            update += 1
        if epoch % max(1, setting.epochs // CURVE) == 0:
            curve.append([epoch, accuracy(model, inputs, labels), accuracy(model, *data()["test"])])
    _, train, test = curve[-1]
    return {"curve": curve, "train": train, "test": test, "gap": train - test}


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """In percent."""
    right = sum(
        int((model(i).argmax(1) == of).sum()) for i, of in zip(inputs.split(5000), labels.split(5000), strict=True)
    )
    return 100.0 * right / len(labels)


EXPERIMENT = Experiment("Generalisation: one step, and the gap", settings, measure, tables, draw, (14.0, 4.0))
