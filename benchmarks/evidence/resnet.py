"""Table 5 and figure 2 on Fashion-MNIST: four optimizers and their variance-reduced twins against batch size.

The run files and JSONs of ``configs/resnet56`` with fewer epochs; the rate by the square-root rule, and at factors of
it, so that each optimizer also has its own best. Plain PyTorch in one process: a micro-batch is a chunk, and
``tests/vision`` holds the same loop to the run under DeepSpeed, of two ranks, update by update; what is saved is the
start of an engine for each of hundreds of short runs. bf16 under autocast on a GPU. A network this small is limited by
the host, so take ``--workers 3``.
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
from benchmarks.evidence.experiment import FULL, Experiment, Row
from benchmarks.evidence.resnet_report import draw, tables
from benchmarks.ranks import device_type
from ds_vrgd.training.groups import parameter_groups
from ds_vrgd.vision.images import fashion_mnist
from ds_vrgd.vision.order import Order
from ds_vrgd.vision.runfile import RunFile
from ds_vrgd.vision.source import InMemory, MicroBatch
from ds_vrgd.vision.train import held_out_sums, make_network

CONFIGS = Path(__file__).parents[2] / "configs" / "resnet56"
PAIRS = ("momentum", "adam", "lamb", "lars")
FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
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

    def runs(batches: Sequence[int], factors: Sequence[float], seeds: Sequence[int]) -> Iterator[Setting]:
        for batch in batches:
            for factor in factors:
                for seed in seeds:
                    for name in twins():
                        yield Setting(name, batch, factor, seed, max(32, batch // 16), 56, 15.0, 60_000, 10_000)

    plan = [
        runs((8192,), FACTORS[:4], (0,)),
        runs((2048,), FACTORS[:4], (0,)),
        runs((8192, 2048), FACTORS[:1], (1, 2)),
        runs((4096, 1024, 512), FACTORS[:1], (0,)),
        runs((8192, 2048), FACTORS[1:3], (1, 2)),
        runs((8192, 4096, 2048, 1024, 512, 256), FACTORS, (0, 1, 2)),
    ]
    return list(dict.fromkeys(setting for part in plan for setting in part))


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
    optimizer.zero_grad()
    return total


EXPERIMENT = Experiment("ResNet on Fashion-MNIST: accuracy against batch", settings, measure, tables, draw, (10.0, 4.5))
