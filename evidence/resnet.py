"""Table 5 and figure 2 on Fashion-MNIST: four optimizers and their variance-reduced twins against batch size.

The run files and JSONs of ``configs/resnet56`` with fewer epochs; the rate by the square-root rule, and at two of the
batches at half of it and further factors, until each optimizer has its own best, with three seeds. Plain PyTorch in
one process: a micro-batch is a chunk, and ``tests/recipes/vision`` holds the same loop to the run of two ranks under
DeepSpeed, update by update; this saves the start of an engine for each of hundreds of short runs. On a GPU bf16 under
autocast, and both passes as CUDA graphs: kernels this small end before the host has launched the next. What it still
does between the graphs leaves room for other processes on the same GPU: ``--workers 12``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import ds_vrgd
from benchmarks.ranks import device_type
from ds_vrgd_recipes.run.groups import parameter_groups
from ds_vrgd_recipes.vision.images import fashion_mnist
from ds_vrgd_recipes.vision.order import Order
from ds_vrgd_recipes.vision.runfile import RunFile
from ds_vrgd_recipes.vision.source import InMemory, MicroBatch
from ds_vrgd_recipes.vision.train import held_out_sums, make_network
from evidence.experiment import FULL, Experiment, Row
from evidence.report import grouped
from evidence.resnet_report import accuracy, draw, tables
from evidence.tuning import SEEDS, tune

CONFIGS = Path(__file__).parents[1] / "configs" / "resnet56"
PAIRS = ("momentum", "adam", "lamb", "lars")
FACTORS = (1.0, 0.5)
APART = 0.5  # accuracy: of ten classes, a network that has not come apart tells more
# Tuned, with three seeds: the paper's largest batch, and the one where its LARS fails and Momentum, Adam, LAMB do not.
TUNED = (8192, 2048)
OTHER_BATCHES = (4096, 1024, 512, 256)
# By the rule with three seeds: where the paper's bases fail.
LARGEST = (8192, 4096)
HELD_OUT_BATCH = 1000


@dataclass(frozen=True)
class Setting:
    """Attributes:
    optimizer: a JSON of ``configs/resnet56``.
    factor: of the rate that the square-root rule gives.
    micro_batch: images of a chunk, so k = batch / micro_batch; for the optimizers without chunks, too, because of
        BatchNorm.
    """

    optimizer: str
    batch: int
    factor: float
    seed: int
    micro_batch: int
    depth: int
    epochs: float
    images: int
    held_out: int


def settings(size: str) -> list[Setting]:
    """The most telling first: a sweep may be cut off at any place."""
    if size != FULL:
        small = (8, 2.0, 1024, 256)
        return [Setting(name, batch, 1.0, 0, 8, *small) for batch in (64, 256) for name in twins()]

    rule = FACTORS[0]
    plan = [(batch, factor, SEEDS[0]) for batch in TUNED for factor in FACTORS]
    plan += [(batch, rule, SEEDS[0]) for batch in OTHER_BATCHES]
    plan += [(batch, rule, seed) for batch in LARGEST for seed in SEEDS[1:]]
    return [_full(name, *one) for one in plan for name in twins()]


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """Each optimizer's own best factor, and there the other seeds, at the batches that are tuned."""
    if size != FULL:
        return []
    return [
        _full(name, batch, factor, seed)
        for (name, batch), of in grouped(rows, "optimizer", "batch").items()
        if batch in TUNED
        for factor, seed in tune(of, "factor", accuracy, FACTORS, apart=APART)
    ]


def _full(optimizer: str, batch: int, factor: float, seed: int) -> Setting:
    return Setting(optimizer, batch, factor, seed, max(32, batch // 16), 56, 15.0, 60_000, 10_000)


def twins() -> Iterator[str]:
    """Each base after its variance-reduced twin."""
    for base in PAIRS:
        yield from (f"vr_{base}", base)


@cache
def source(images: int, held_out: int) -> InMemory:
    """The first images of Fashion-MNIST, on the device."""
    return InMemory(fashion_mnist().part(images, held_out), torch.device(device_type()))


def run_of(setting: Setting) -> RunFile:
    """The run file of a setting: that of ``configs/resnet56`` for its batch, but for what is a field."""
    return RunFile.model_validate(
        {
            "seed": setting.seed,
            "data": {"source": "fashion-mnist"},
            "model": {"network": "resnet-small", "depth": setting.depth},
            "global_batch": setting.batch,
            "micro_batch": setting.micro_batch,
            "epochs": setting.epochs,
            "warmup_epochs": setting.epochs / 10,
            "lr_base_batch": 256,
            "label_smoothing": 0.1,
        }
    )


def measure(setting: Setting) -> Row:
    """Train and evaluate.

    Returns:
        ``evaluations``: epochs, held-out loss and accuracy. ``accuracy``: the last one. ``loss``: the last one, NaN
        where the run came apart. ``rate``: the peak. ``updates``.
    """
    return train(setting, source(setting.images, setting.held_out))


def train(setting: Setting, data: InMemory) -> Row:
    """As ``measure`` says."""
    run, device = run_of(setting), torch.device(device_type())
    model = make_network(run, data).to(device)
    if device.type == "cuda":
        graph(model, setting.micro_batch)
    configured: dict[str, Any] = json.loads((CONFIGS / f"{setting.optimizer}.json").read_text())["optimizer"]
    lr = configured["params"]["lr"] * setting.factor
    optimizer = getattr(ds_vrgd, configured["type"])(parameter_groups(model), **configured["params"] | {"lr": lr})
    order, steps = Order(data.images, run.seed, run.global_batch, run.micro_batch), run.steps(data.images)
    batches = data.training(order, order.places(0, steps, 0, 1))
    evaluated = {step for step in range(1, steps) if run.is_due(1.0, step, data.images)} | {steps}
    evaluations: list[tuple[float, float, float]] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr_at(step, data.images, lr)
        update(model, optimizer, batches, run)
        if step + 1 in evaluated:
            sums = held_out_sums(model, data.held_out(min(HELD_OUT_BATCH, setting.held_out), 0, 1), device)
            loss, correct, count = sums.tolist()
            evaluations.append(((step + 1) * setting.batch / data.images, loss / count, correct / count))
            if not math.isfinite(loss):
                break
    _, loss, accuracy = evaluations[-1]
    peak = max(run.lr_at(step, data.images, lr) for step in range(steps))
    return {"evaluations": evaluations, "accuracy": accuracy, "loss": loss, "rate": peak, "updates": steps}


def graph(model: torch.nn.Module, micro_batch: int) -> None:
    """Have the model's passes over training micro-batches replayed as CUDA graphs; evaluation stays as it is.

    Before it has an optimizer: what observes gradients would see those of the capture.
    """
    kept = [buffer.clone() for buffer in model.buffers()]
    images = torch.zeros(micro_batch, 3, 32, 32, dtype=torch.uint8, device=next(model.parameters()).device)
    torch.cuda.make_graphed_callables(model, (images,))
    for buffer, before in zip(model.buffers(), kept, strict=True):
        buffer.copy_(before)  # the capture is no training step
    for param in model.parameters():
        # Gradients are added into it. Autograd would take a first one as it is, and the next replay overwrite it.
        param.grad = torch.zeros_like(param)


def update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[MicroBatch], run: RunFile
) -> torch.Tensor:
    """One update; the mean loss over its chunks, on the device."""
    chunks = run.global_batch // run.micro_batch
    total = torch.zeros((), device=next(model.parameters()).device)
    for _ in range(chunks):
        images, labels = next(batches)
        loss = functional.cross_entropy(model(images), labels, label_smoothing=run.label_smoothing) / chunks
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


EXPERIMENT = Experiment(
    "ResNet on Fashion-MNIST: accuracy against batch",
    settings,
    measure,
    tables,
    draw,
    (13.0, 4.5),
    follow_up,
    kind=lambda setting: setting.batch,
)
